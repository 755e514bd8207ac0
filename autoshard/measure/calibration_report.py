"""The report of a calibration run: one HTML page with the measured points, the fit and its errors as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from cost_models import COLLECTIVE_KINDS, Profile
from cost_models.fit import Compared, grouped, honest, mesh_of, residual, series_of
from cost_models.samples import CollectivePoint, KernelPoint, Point, Samples

from .calibrate import Calibration
from .chart import COLOURS, Dot, Line, Mark, Panel, Picture, Scale, spanning
from .output import write

# Pixels of the pictures.
LEFT, TOP, BOTTOM, GAP = 60.0, 46.0, 44.0, 14.0
COLLECTIVE_WIDTH, TIMES_HEIGHT, ERRORS_HEIGHT = 230.0, 300.0, 100.0
KERNELS_WIDTH, KERNELS_HEIGHT, LEGEND_WIDTH = 420.0, 400.0, 170.0

GOOD_ERROR = 0.2
"""The error of a fit up to which its dots lie in the shaded band."""

_TEMPLATES = Environment(loader=PackageLoader("autoshard.measure"), autoescape=True, undefined=StrictUndefined)


def write_report(found: Calibration, page_path: Path, with_pictures: bool) -> list[Path]:
    """Writes the page and, where wanted, its pictures as files beside it; returns the paths of what was written.

    Raises:
        CalibrationError: one cannot be written.
    """
    parts = found.profile, found.samples, found.compared
    drawn = pictures(*parts)
    write(page_path, page(*parts, drawn).encode())
    files = [page_path]
    for picture in drawn if with_pictures else ():
        files.append(page_path.with_name(f"{picture.name}.svg"))
        write(files[-1], svg(picture).encode())
    return files


def pictures(profile: Profile, samples: Samples, compared: Sequence[Compared]) -> tuple[Picture, ...]:
    """One picture for the collectives of each axis, and one for the kernels."""
    axes = dict.fromkeys(one.point.axis for one in compared if isinstance(one.point, CollectivePoint))
    return (*(_collectives(axis, profile, samples, compared) for axis in axes), _kernels(compared))


def svg(picture: Picture) -> str:
    """A picture as the text of an SVG file."""
    return _TEMPLATES.get_template("chart.svg").render(picture=picture)


def page(profile: Profile, samples: Samples, compared: Sequence[Compared], drawn: Sequence[Picture]) -> str:
    """The report as one HTML text that needs no other file."""
    return _TEMPLATES.get_template("calibration.html").render(
        title=f"Calibration of {profile.name} on {samples.header.mesh}",
        facts=_facts(profile, samples),
        errors=_errors(compared),
        pictures=drawn,
    )


def _facts(profile: Profile, samples: Samples) -> list[tuple[str, ...]]:
    header = samples.header
    return [
        ("mesh", f"{header.mesh}, hosts of the ranks {', '.join(map(str, header.hosts))}"),
        ("device", f"{header.device}, {header.backend}"),
        *((key, value) for key, value in (*header.machine.items(), *header.versions.items())),
        ("started", header.created),
        ("command", header.command),
        ("samples", f"{len(samples.samples)} of {len(samples.by_point())} points"),
        ("contention", f"a collective beside kernels still costs {profile.contention:.0%} of its time"),
        ("issue", f"an operator in a row of others takes {profile.compute.issue_s * 1e6:.1f} us beyond its kernel"),
        ("meeting", f"a collective behind it takes {profile.meeting_s * 1e3:.2f} ms beyond its time alone"),
    ]


def _errors(compared: Sequence[Compared]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "", "median", "largest", "points", "held out")]
    for group in grouped(compared):
        chosen = honest(group)
        found = residual(chosen)
        first, second = series_of(group[0].point)
        if found is None:
            rows.append((first, second, "-", "-", "-", "none held out"))
            continue
        held_out = "yes" if chosen[0].point.held_out else "no"
        rows.append((first, second, f"{found.median:.0%}", f"{found.largest:.0%}", str(found.points), held_out))
    return rows


def _collectives(axis: str, profile: Profile, samples: Samples, compared: Sequence[Compared]) -> Picture:
    """For each kind, milliseconds over bytes, and below it the relative error; all kinds on the same axes."""
    mine = [one for one in compared if isinstance(one.point, CollectivePoint) and one.point.axis == axis]
    kinds = [kind for kind in COLLECTIVE_KINDS if any(series_of(one.point) == (axis, kind) for one in mine)]
    axes, shape = mesh_of(samples.header)
    topology, by_point = profile.topology(axes, shape), samples.by_point()
    (group,) = {tuple(map(axes.index, one.point.axes)) for one in mine if isinstance(one.point, CollectivePoint)}
    foot = TOP + TIMES_HEIGHT
    milliseconds = [s * 1e3 for one in mine for s in (*by_point[one.point], one.measured_s, one.predicted_s)]
    times = spanning(milliseconds, foot, TOP)
    errors = Scale(-1.0, 1.0, foot + GAP + ERRORS_HEIGHT, foot + GAP, logarithmic=False)
    panels: list[Panel] = []
    for k, kind in enumerate(kinds):
        start = LEFT + k * (COLLECTIVE_WIDTH + GAP)
        bytes_axis = spanning((_size(one.point) for one in mine), start, start + COLLECTIVE_WIDTH)
        own = [one for one in mine if series_of(one.point) == (axis, kind)]
        sizes = _between([_size(one.point) for one in own])
        fitted = [(size, float(topology.collective_s(kind, group, size)) * 1e3) for size in sizes]
        panels.append(_times(Panel(bytes_axis, times, title=kind, named_y=k == 0), own, by_point, fitted))
        panels.append(_relative_errors(Panel(bytes_axis, errors, named_y=k == 0), own))
    width = LEFT + len(kinds) * (COLLECTIVE_WIDTH + GAP)
    return Picture(f"collectives-{axis}", f"Collectives over {axis}", width, errors.first_px + BOTTOM, tuple(panels))


def _times(
    panel: Panel,
    own: Sequence[Compared],
    by_point: Mapping[Point, Sequence[float]],
    fitted: Sequence[tuple[float, float]],
) -> Panel:
    """The milliseconds of every sample, above them the medians, and the fit."""
    dots = [panel.dot(_size(one.point), s * 1e3, "sample", COLOURS[0]) for one in own for s in by_point[one.point]]
    dots += [panel.dot(_size(one.point), one.measured_s * 1e3, _mark(one), COLOURS[0]) for one in own]
    return replace(panel, dots=tuple(dots), lines=(panel.line(fitted, COLOURS[0]),), y_label="milliseconds")


def _relative_errors(panel: Panel, own: Sequence[Compared]) -> Panel:
    dots = tuple(panel.dot(_size(one.point), one.error, _mark(one), COLOURS[0]) for one in own)
    return replace(panel, dots=dots, x_label="bytes", y_label="error of the fit", band=(-GOOD_ERROR, GOOD_ERROR))


def _kernels(compared: Sequence[Compared]) -> Picture:
    """Rates: of kernels that compute over their flops, of those that stream over their bytes."""
    own = [one for one in compared if isinstance(one.point, KernelPoint)]
    start = LEFT + KERNELS_WIDTH + LEGEND_WIDTH + LEFT
    computing = [one for one in own if _computes(one.point)]
    streaming = [one for one in own if not _computes(one.point)]
    panels = (
        _rates(computing, LEFT, "Products, attention, convolution", "flops", "GFLOP/s"),
        _rates(streaming, start, "Kernels that stream", "bytes read and written", "GB/s"),
    )
    width, height = start + KERNELS_WIDTH + LEGEND_WIDTH, TOP + KERNELS_HEIGHT + BOTTOM
    return Picture("kernels", "Kernels", width, height, tuple(panel for panel in panels if panel is not None))


def _rates(own: Sequence[Compared], start_px: float, title: str, x_label: str, y_label: str) -> Panel | None:
    """The rates of kernels, in billions a second, over their sizes; None where none were measured."""
    if not own:
        return None
    rates = [_size(one.point) / seconds / 1e9 for one in own for seconds in (one.measured_s, one.predicted_s)]
    panel = Panel(
        spanning((_size(one.point) for one in own), start_px, start_px + KERNELS_WIDTH),
        spanning(rates, TOP + KERNELS_HEIGHT, TOP),
        title=title,
        x_label=x_label,
        y_label=y_label,
    )
    dots: list[Dot] = []
    lines: list[Line] = []
    for colour, (label, group) in zip(cycle(COLOURS), _labelled(own)):
        for one in group:
            size = _size(one.point)
            dots.append(panel.dot(size, size / one.measured_s / 1e9, _mark(one), colour))
        fitted = sorted((_size(one.point), _size(one.point) / one.predicted_s / 1e9) for one in group)
        lines.append(panel.line(fitted, colour, label))
    return replace(panel, dots=tuple(dots), lines=tuple(lines))


def _mark(one: Compared) -> Mark:
    return "held out" if one.point.held_out else "fitted"


def _labelled(own: Sequence[Compared]) -> Iterator[tuple[str, list[Compared]]]:
    names = dict.fromkeys((one.point.name, one.point.dtype) for one in own if isinstance(one.point, KernelPoint))
    for name, dtype in names:
        group = [c for c in own if isinstance(c.point, KernelPoint) and (c.point.name, c.point.dtype) == (name, dtype)]
        yield f"{name} {dtype}", group


def _computes(point: Point) -> bool:
    return series_of(point)[0] in ("matmul", "attention", "convolution")


def _size(point: Point) -> float:
    if isinstance(point, CollectivePoint):
        return float(point.size_bytes)
    assert isinstance(point, KernelPoint), "what runs beside something else is in no picture"
    return point.flops if _computes(point) else point.bytes_moved


def _between(sizes: Sequence[float]) -> list[float]:
    """201 sizes from the smallest to the largest, evenly on a logarithmic scale: where a fitted curve is drawn."""
    low, high = min(sizes), max(sizes)
    return [low * (high / low) ** (step / 200) for step in range(201)] if high > low else [low]
