"""A profile from samples: what a calibration run measured becomes what planning prices with.

Every point is the median of its samples, so that single outliers count for nothing. A series of points (one collective
on one axis, one kind of kernel) becomes a curve through its medians: straight between neighbours and never falling,
where noise made it fall by isotonic regression of the logarithms, which weighs relative errors. No formula is forced
on the machine: libraries change algorithms with the size. Points that are held out of the fit lie halfway between two
of the curve, and their errors are its residuals.

Source: isotonic regression by pooling adjacent violators: R. Barlow, D. Bartholomew, J. Bremner, H. Brunk,
"Statistical Inference under Order Restrictions", Wiley 1972, section 1.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from .amounts import Array
from .collective_kinds import COLLECTIVE_KINDS
from .collectives import wire_bytes
from .compute import Compute, Efficiency
from .curve import Curve
from .errors import ProfileError
from .link import Link
from .measured import MeasuredMesh
from .profile import Profile
from .provenance import Provenance, Residual
from .samples import CollectivePoint, Header, KernelPoint, Point, RowPoint, Samples, TogetherPoint

# A curve that is flat at its end (the run stopped at sizes where starting takes all the time) goes on at 1 TB/s.
_FASTEST_S_PER_BYTE = 1e-12
_DIGITS = 6  # of the numbers in a profile
_RISE = 2e-5  # the least relative rise from knot to knot: more bytes are never free, whatever rounding does
_NO_PEERS = Link("no peers", latency_s=0.0, bandwidth_bytes_per_s=1e12)
_SOURCES = (
    "Measured by autoshard calibrate: medians of samples, all ranks at once, the slowest rank counts. Residuals of "
    "collectives are of sizes that were held out of the fit. memory_bandwidth_bytes_per_s is the fastest that any "
    "streaming kernel reached, caches included."
)


def isotonic(values: Sequence[float]) -> Array:
    """The sequence that never falls and is nearest to ``values`` by least squares."""
    blocks: list[tuple[float, int]] = []  # mean, length
    for value in values:
        blocks.append((float(value), 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (a, m), (b, n) = blocks[-2:]
            blocks[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return np.array([mean for mean, length in blocks for _ in range(length)])


@dataclass(frozen=True)
class Compared:
    """A point with the seconds that a profile predicts and the median of those that were measured."""

    point: Point
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative to what was measured; negative where the profile is too fast."""
        return self.predicted_s / self.measured_s - 1.0


def fit(samples: Samples, *, name: str, memory_bytes: int) -> Profile:
    """The profile of the mesh and machine that the samples are of.

    Raises:
        ProfileError: samples are missing: an axis of several ranks without collectives, or no kernels in float32.
    """
    everything = {point: median(seconds) for point, seconds in samples.by_point().items()}
    medians = {point: seconds for point, seconds in everything.items() if not point.held_out}
    axes, shape = mesh_of(samples.header)
    collectives = {p: s for p, s in medians.items() if isinstance(p, CollectivePoint)}
    links = tuple(fit_link(axis, ranks, collectives) for axis, ranks in zip(axes, shape))
    kernels = fit_compute({p: s for p, s in medians.items() if isinstance(p, KernelPoint)})
    compute = replace(kernels, issue_s=fit_issue(everything))
    network = MeasuredMesh(axes, shape, links, _fit_groups(axes, shape, collectives))
    contention = fit_contention(everything)
    fitted = Profile(
        name,
        Provenance(_SOURCES),
        memory_bytes,
        compute,
        network,
        contention=contention,
        meeting_s=fit_meeting(everything),
        bucket_copies=True,
    )
    return replace(fitted, provenance=_provenance(samples.header, compare(fitted, samples)))


def fit_link(axis: str, ranks: int, medians: Mapping[CollectivePoint, float]) -> Link:
    """The link of one axis of ``ranks`` ranks from the seconds of points.

    The launch of a kind is what its curve has left at zero bytes (hops are in it: one number of ranks cannot tell them
    apart). All-reduce and reduce-scatter share their launch, and where noise made the reduce-scatter the slower one
    both get their geometric mean: an all-reduce contains one.

    Raises:
        ProfileError: the axis has several ranks and no points.
    """
    if ranks == 1:
        return _NO_PEERS
    series = {kind: _series(axis, kind, medians) for kind in COLLECTIVE_KINDS}
    series = {kind: points for kind, points in series.items() if points}
    if not series:
        raise ProfileError(f"there are no samples of collectives over the axis {axis!r}; measure it again")
    _hold_reduce_scatter(series)
    curves, launches = {}, {kind: _rounded(_at_zero(points)) for kind, points in series.items()}
    both = [launches[kind] for kind in _REDUCING if kind in launches]
    launches |= {kind: min(both) for kind in _REDUCING if kind in launches}
    for kind, points in series.items():
        knots = ((wire_bytes(kind, ranks, size), s - launches[kind]) for size, s in points)
        curves[kind] = _curve((float(x), y) for x, y in knots)
    _hold_reduce_scatter_tail(curves)
    slowest = max(curve.tail for curve in curves.values())
    return Link(
        name=f"measured over {axis}",
        latency_s=0.0,
        bandwidth_bytes_per_s=_rounded(1.0 / slowest),
        launch_s=max(launches.values()),
        launches_s=launches,
        curves=curves,
    )


def _fit_groups(
    axes: tuple[str, ...], shape: tuple[int, ...], medians: Mapping[CollectivePoint, float]
) -> dict[tuple[str, ...], Link]:
    """The links of groups of axes, of those that were measured as one group."""
    size = dict(zip(axes, shape))
    groups = {point.axis: point.axes for point in medians if len(point.axes) > 1}
    return {
        group: fit_link(name, math.prod(size[axis] for axis in group), medians)
        for name, group in sorted(groups.items())
    }


_REDUCING = ("all_reduce", "reduce_scatter")

Series = list[tuple[float, float]]  # (bytes or flops, seconds), both rising


def _series(axis: str, kind: str, medians: Mapping[CollectivePoint, float]) -> Series:
    found = sorted((p.size_bytes, s) for p, s in medians.items() if (p.axis, p.kind) == (axis, kind))
    return _never_falling([(float(size), seconds) for size, seconds in found])


def _never_falling(points: Series) -> Series:
    """The nearest series that rises, by relative error."""
    seconds = np.exp(isotonic([float(np.log(s)) for _, s in points]))
    rising = seconds * (1.0 + _RISE * np.arange(len(points)))
    return [(x, float(s)) for (x, _), s in zip(points, rising)]


def _hold_reduce_scatter(series: dict[str, Series]) -> None:
    """Makes a reduce-scatter cost at most the all-reduce of the same size, where both were measured at it."""
    if not all(kind in series for kind in _REDUCING):
        return
    reduce, scatter = (dict(series[kind]) for kind in _REDUCING)
    for size in reduce.keys() & scatter.keys():
        if scatter[size] > reduce[size]:
            scatter[size] = reduce[size] = float(np.sqrt(scatter[size] * reduce[size]))
    for kind, points in zip(_REDUCING, (reduce, scatter)):
        series[kind] = _never_falling(sorted(points.items()))


def _at_zero(points: Series) -> float:
    """Seconds that the first two points leave for zero bytes; a tenth of the first one is kept for its bytes."""
    (x0, y0), (x1, y1) = points[0], points[min(1, len(points) - 1)]
    slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
    return min(max(y0 - slope * x0, 0.0), 0.9 * y0)


def _curve(knots: Iterable[tuple[float, float]]) -> Curve:
    """Through the knots; beyond the last at least half as steep as on average up to it."""
    points = list(knots)
    (x, y) = points[-1]
    before = points[-2] if len(points) > 1 else (0.0, 0.0)
    least = max(0.5 * y / x, _FASTEST_S_PER_BYTE)
    points[-1] = (x, max(y, before[1] + least * (x - before[0])))
    return Curve.through((x, _rounded(y)) for x, y in points)


def _hold_reduce_scatter_tail(curves: dict[str, Curve]) -> None:
    """Makes the all-reduce, which sends twice as much, nowhere cheaper, and at its end at least half as steep."""
    if not all(kind in curves for kind in _REDUCING):
        return
    reduce, scatter = (curves[kind] for kind in _REDUCING)
    knots = [(x, max(y, float(scatter(x / 2)))) for x, y in reduce.knots]
    (x0, y0), (x1, y1) = [(0.0, 0.0), *knots][-2:]
    steep = y0 + scatter.tail / 2 * (x1 - x0)
    knots[-1] = (x1, y1 if y1 >= steep else _rounded(steep * (1.0 + _RISE)))
    curves["all_reduce"] = Curve.through(knots)


def fit_compute(medians: Mapping[KernelPoint, float]) -> Compute:
    """The constants of one device from the seconds of kernels.

    The launch is the time of the shortest kernel; of an optimizer's step, that of the shortest step. Peaks are the best
    rate of a product, attention or convolution in each dtype, the memory bandwidth is the best of any other kernel;
    efficiencies are the shares that sizes reached.

    Raises:
        ProfileError: no product in float32, or no streaming kernel, was measured.
    """
    products = {p: s for p, s in medians.items() if p.kind in _COMPUTING}
    streams = {p: s for p, s in medians.items() if p.kind not in _COMPUTING}
    if not streams or not any((p.kind, p.dtype) == ("matmul", "float32") for p in products):
        raise ProfileError("there are no samples of kernels (matmul in float32, and streams); measure them again")
    steps = {p: s for p, s in streams.items() if p.kind == "optimizer"}
    launch_s = _rounded(0.9 * min(medians.values()))  # a tenth is left for the bytes
    optimizer_launch_s = _rounded(0.9 * min(steps.values())) if steps else 0.0
    by_flops = _busy(products, launch_s, lambda point: point.flops)
    by_bytes = {
        **_busy({p: s for p, s in streams.items() if p not in steps}, launch_s, lambda point: point.bytes_moved),
        **_busy(steps, optimizer_launch_s, lambda point: point.bytes_moved),
    }
    dtypes = sorted({dtype for _, dtype in by_flops})
    peaks = {d: max(_best(points) for (_, dtype), points in by_flops.items() if dtype == d) for d in dtypes}
    bandwidth = max(_best(points) for points in by_bytes.values())
    compute = {name: _efficiency(points, peaks[name[1]]) for name, points in by_flops.items()}
    memory = {name: _efficiency(points, bandwidth) for name, points in by_bytes.items()}
    fallback = memory.get(("pointwise", "float32")) or next(iter(memory.values()))
    return Compute(
        launch_s=launch_s,
        optimizer_launch_s=optimizer_launch_s,
        memory_bandwidth_bytes_per_s=bandwidth,
        peak_flops_per_s=peaks,
        compute_efficiency={"default": 1.0} | _by_kind(compute),
        # what a product reads and writes is in the time that was measured of it
        memory_efficiency={"default": fallback} | dict.fromkeys(_COMPUTING, 1.0) | _by_kind(memory),
    )


_COMPUTING = ("matmul", "attention", "convolution")

Kernels = Mapping[tuple[str, str], Series]


def _busy(medians: Mapping[KernelPoint, float], launch_s: float, amount: Callable[[KernelPoint], float]) -> Kernels:
    """By kind and dtype, the seconds beyond the launch over an amount of work.

    Kernels of one kind count alike: where their amounts lie within a factor of two, their geometric means do.
    """
    found: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {}
    for point, seconds in sorted(medians.items()):
        octave = int(np.log2(amount(point)))
        series = found.setdefault((point.kind, point.dtype), {})
        series.setdefault(octave, []).append((amount(point), seconds - launch_s))
    return {key: _never_falling([_mean(near) for _, near in sorted(s.items())]) for key, s in found.items()}


def _mean(points: Series) -> tuple[float, float]:
    amount, seconds = np.exp(np.mean(np.log(points), axis=0))
    return float(amount) if len(points) > 1 else points[0][0], float(seconds)


def _best(points: Series) -> float:
    return _rounded(max(amount / seconds for amount, seconds in points))


def _efficiency(points: Series, peak: float) -> Efficiency:
    return Efficiency(tuple((_rounded(x), min(_rounded(x / seconds / peak), 1.0)) for x, seconds in points))


def _by_kind(shares: Mapping[tuple[str, str], Efficiency]) -> dict[str, float | Efficiency]:
    """A kind goes by its float32 where that was measured; other dtypes have entries of their own."""
    plain = {kind: share for (kind, dtype), share in shares.items() if dtype == "float32"}
    others = {f"{kind}/{dtype}": share for (kind, dtype), share in shares.items() if dtype != "float32"}
    return {**plain, **others}


LEAST_HIDDEN = 0.2
"""The share of a collective and of kernels together that could hide, below which a point says nothing of what did."""


def fit_contention(medians: Mapping[Point, float]) -> float:
    """The share of its time that a collective costs although kernels run beside it: the median over the points.

    Kernels of K seconds and a collective of C, as measured alone, take ``K + C - (1 - contention) min(K, C)`` together:
    the shorter of the two could hide whole. 1 where no point says, or where side by side they take longer.
    """
    shares = []
    for point, seconds in medians.items():
        if not isinstance(point, TogetherPoint) or not {point.collective, point.kernel} <= medians.keys():
            continue
        kernels_s, collective_s = point.kernels * medians[point.kernel], medians[point.collective]
        hidden_s = min(kernels_s, collective_s)
        if hidden_s >= LEAST_HIDDEN * (kernels_s + collective_s):
            shares.append(1.0 - (kernels_s + collective_s - seconds) / hidden_s)
    return _rounded(min(max(median(shares), 0.0), 1.0)) if shares else 1.0


def fit_issue(medians: Mapping[Point, float]) -> float:
    """Seconds that each operator of a row takes beyond its kernel, views included: the median over the rows, 0 where
    there are none.

    A row of kernels takes longer than the sum of them, each run again and again: what the host executes for one
    operator has left its caches when the next one of that kind comes.
    """
    beyond = [
        (seconds - math.fsum(medians[kernel] for kernel in point.kernels)) / (len(point.kernels) + point.views)
        for point, seconds in medians.items()
        if isinstance(point, RowPoint) and point.collective is None and medians.keys() >= set(point.kernels)
    ]
    return _rounded(max(median(beyond), 0.0)) if beyond else 0.0


def fit_meeting(medians: Mapping[Point, float]) -> float:
    """Seconds that a collective behind a row takes beyond the row and itself, each alone: the median over the points,
    0 where there are none.

    Alone it starts on all ranks at once. Behind a row the ranks come one after the other where they share cores, and
    the last of them has left a core idle while it came.
    """
    beyond = []
    for point, seconds in medians.items():
        if not isinstance(point, RowPoint) or point.collective is None:
            continue
        row, behind = replace(point, collective=None), point.collective
        if {row, behind} <= medians.keys():
            beyond.append(seconds - medians[row] - medians[behind])
    return _rounded(max(median(beyond), 0.0)) if beyond else 0.0


def mesh_of(header: Header) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The axes and sizes of the mesh that was measured.

    Raises:
        ProfileError: the header's mesh is no list of ``axis=size``.
    """
    entries = [entry.partition("=") for entry in header.mesh.split(",")]
    if not all(axis and size.isdecimal() and int(size) > 0 for axis, _, size in entries):
        raise ProfileError(f"the samples name the mesh {header.mesh!r}, which is no list of axis=size")
    return tuple(axis for axis, _, _ in entries), tuple(int(size) for _, _, size in entries)


def compare(profile: Profile, samples: Samples) -> list[Compared]:
    """Every point, predicted and measured, in the order of points."""
    axes, shape = mesh_of(samples.header)
    topology, alone = profile.topology(axes, shape), replace(profile.compute, issue_s=0.0)

    def seconds(point: Point) -> float:
        if isinstance(point, RowPoint):
            operators = len(point.kernels) + point.views
            row_s = math.fsum(map(seconds, point.kernels)) + operators * profile.compute.issue_s
            return row_s + (seconds(point.collective) + profile.meeting_s if point.collective else 0.0)
        if isinstance(point, CollectivePoint):
            return topology.collective_s(point.kind, tuple(map(axes.index, point.axes)), point.size_bytes)
        if isinstance(point, TogetherPoint):
            kernels_s, collective_s = point.kernels * seconds(point.kernel), seconds(point.collective)
            return kernels_s + collective_s - (1.0 - profile.contention) * min(kernels_s, collective_s)
        return float(alone.op_s(point.dtype, point.flops, point.bytes_moved, point.kind))

    found = samples.by_point()
    return [Compared(point, seconds(point), median(found[point])) for point in sorted(found, key=_order)]


def _order(point: Point) -> tuple[object, ...]:
    if isinstance(point, CollectivePoint):
        return 0, point.axis, COLLECTIVE_KINDS.index(point.kind), point.size_bytes
    if isinstance(point, TogetherPoint):
        return 2, *_order(point.collective), point.kernels
    if isinstance(point, RowPoint):
        behind = _order(point.collective) if point.collective else ()
        return 3, behind, *(_order(kernel) for kernel in point.kernels), point.views
    return 1, point.kind, point.name, point.dtype, point.flops + point.bytes_moved


def residual(compared: Iterable[Compared]) -> Residual | None:
    """The median and the largest absolute relative error of some points; None where there are no points."""
    errors = [abs(one.error) for one in compared]
    return Residual(_rounded(median(errors)), _rounded(max(errors)), len(errors)) if errors else None


def honest(compared: Sequence[Compared]) -> list[Compared]:
    """The points whose errors say something: held out of the fit, or of those that one number is fitted to."""
    return [one for one in compared if one.point.held_out or isinstance(one.point, TogetherPoint | RowPoint)]


def _provenance(header: Header, compared: Sequence[Compared]) -> Provenance:
    collectives: dict[str, dict[str, Residual]] = {}
    kernels: dict[str, Residual] = {}
    together: dict[str, dict[str, Residual]] = {}
    rows: dict[str, Residual] = {}
    for group in grouped(compared):
        point, found = group[0].point, residual(honest(group))
        if found is None:  # every point was fitted, and lies on the curve
            continue
        if isinstance(point, CollectivePoint):
            collectives.setdefault(point.axis, {})[point.kind] = found
        elif isinstance(point, TogetherPoint):
            together.setdefault(point.collective.axis, {})[point.collective.kind] = found
        elif isinstance(point, RowPoint):
            rows["with a collective" if point.collective else "alone"] = found
        else:
            kernels[f"{point.kind}/{point.dtype}"] = found
    facts = ", ".join(f"{key} {value}" for key, value in header.machine.items())
    return Provenance(
        sources=_SOURCES,
        machine=f"{facts}; {header.device} with {header.backend}, hosts {len(set(header.hosts))}",
        date=header.created[:10],
        command=header.command,
        versions=header.versions,
        collectives=collectives,
        kernels=kernels,
        together=together,
        rows=rows,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def grouped(compared: Sequence[Compared]) -> list[list[Compared]]:
    """The points of each collective on each axis, of each kind of kernel in each dtype, and of each collective that was
    on its way beside kernels.
    """
    found: dict[tuple[type, tuple[str, str]], list[Compared]] = {}
    for one in compared:
        found.setdefault((type(one.point), series_of(one.point)), []).append(one)
    return list(found.values())


def series_of(point: Point) -> tuple[str, str]:
    """What the points of one series have in common, in two words: an axis and a collective, or a kind and a dtype."""
    if isinstance(point, CollectivePoint):
        return point.axis, point.kind
    if isinstance(point, TogetherPoint):
        return point.collective.axis, f"{point.collective.kind} beside {point.kernel.name}"
    if isinstance(point, RowPoint):
        return "operators", "in a row, a collective behind" if point.collective else "in a row"
    return point.kind, point.dtype
