"""The report of a calibration run: one HTML page with the measured points, the fit and its errors as pictures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cost_models import COLLECTIVE_KINDS, Profile
from cost_models.fit import Compared, grouped, honest, mesh_of, residual
from cost_models.samples import CollectivePoint, KernelPoint, Point, Samples

from .calibrate import Calibration
from .output import write

DPI = 100
_COLOURS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#8c564b",
    "#17becf",
    "#7f7f7f",
    "#e377c2",
    "#bcbd22",
)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }}
table {{ border-collapse: collapse; margin: 1em 0 }} td, th {{ padding: .2em .8em; border-bottom: 1px solid #ddd }}
td.n {{ text-align: right; font-variant-numeric: tabular-nums }} th {{ text-align: left }} img {{ max-width: 100% }}
</style></head><body><h1>{title}</h1>
{facts}
<h2>Errors</h2>
<p>Relative error of the fit against the median of the samples, where there are any on sizes that were held out of the
fit.</p>
{errors}
<h2>Pictures</h2>
<p>Small dots are samples (one repetition, the slowest rank), large ones their medians, rings medians that were held out
of the fit, lines the fit. Times are those of one operation while all ranks run it.</p>
{pictures}
</body></html>
"""


def write_report(found: Calibration, page_path: Path, with_pictures: bool) -> list[Path]:
    """Writes the page, and beside it its pictures where wanted; which files.

    Raises:
        CalibrationError: one cannot be written.
    """
    parts = found.profile, found.samples, found.compared
    drawn = pictures(*parts)
    write(page_path, page(*parts, drawn).encode())
    files = [page_path]
    for name, data in drawn.items() if with_pictures else ():
        files.append(page_path.with_name(f"{name}.png"))
        write(files[-1], data)
    return files


def pictures(profile: Profile, samples: Samples, compared: Sequence[Compared]) -> dict[str, bytes]:
    """Every picture as PNG, by the name of its file without the suffix."""
    found = {}
    for axis in dict.fromkeys(one.point.axis for one in compared if isinstance(one.point, CollectivePoint)):
        found[f"collectives-{axis}"] = _png(_collectives(axis, profile, samples, compared))
    found["kernels"] = _png(_kernels(profile, samples, compared))
    return found


def page(profile: Profile, samples: Samples, compared: Sequence[Compared], drawn: dict[str, bytes]) -> str:
    """The report as one HTML text that needs no other file."""
    images = (
        f'<h3>{html.escape(name)}</h3><img alt="{html.escape(name)}" src="data:image/png;base64,'
        f'{base64.b64encode(data).decode()}">'
        for name, data in drawn.items()
    )
    return _PAGE.format(
        title=html.escape(f"Calibration of {profile.name} on {samples.header.mesh}"),
        facts=_table(_facts(samples)),
        errors=_table(_errors(compared)),
        pictures="\n".join(images),
    )


def _facts(samples: Samples) -> list[tuple[str, ...]]:
    header = samples.header
    return [
        ("mesh", f"{header.mesh}, hosts of the ranks {', '.join(map(str, header.hosts))}"),
        ("device", f"{header.device}, {header.backend}"),
        *((key, value) for key, value in (*header.machine.items(), *header.versions.items())),
        ("started", header.created),
        ("command", header.command),
        ("samples", f"{len(samples.samples)} of {len(samples.by_point())} points"),
    ]


def _errors(compared: Sequence[Compared]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "", "median", "largest", "points", "held out")]
    for group in grouped(compared):
        point, chosen = group[0].point, honest(group)
        found = residual(chosen)
        assert found is not None
        first, second = (point.axis, point.kind) if isinstance(point, CollectivePoint) else (point.kind, point.dtype)
        held_out = "yes" if chosen[0].point.held_out else "no"
        rows.append((first, second, f"{found.median:.0%}", f"{found.largest:.0%}", str(found.points), held_out))
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    def cell(text: str) -> str:
        return f"<td{' class=n' if text[:1].isdigit() and len(text) < 8 else ''}>{html.escape(text)}</td>"

    return "<table>" + "\n".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows) + "</table>"


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _collectives(axis: str, profile: Profile, samples: Samples, compared: Sequence[Compared]) -> Figure:
    """For each kind, seconds over bytes, and below it the relative error."""
    mine = [one for one in compared if isinstance(one.point, CollectivePoint) and one.point.axis == axis]
    kinds = [kind for kind in COLLECTIVE_KINDS if any(one.point.kind == kind for one in mine)]
    figure = Figure(figsize=(3.4 * len(kinds), 6.0), layout="constrained")
    grid = figure.subplots(2, len(kinds), squeeze=False, sharex=True, sharey="row", height_ratios=(3, 1))
    axes, shape = mesh_of(samples.header)
    topology = profile.topology(axes, shape)
    by_point = samples.by_point()
    for kind, upper, lower in zip(kinds, grid[0], grid[1]):
        own = [one for one in mine if one.point.kind == kind]
        sizes = [float(_size(one.point)) for one in own]
        line = [float(topology.collective_s(kind, axes.index(axis), size)) for size in _between(sizes)]
        upper.loglog(_between(sizes), [s * 1e3 for s in line], color=_COLOURS[0])
        _dots(upper, own, {one.point: [s * 1e3 for s in by_point[one.point]] for one in own}, 1e3, _COLOURS[0])
        upper.set_title(kind)
        _error(lower, own, _COLOURS[0])
        lower.set_xlabel("bytes")
    grid[0][0].set_ylabel("milliseconds")
    grid[1][0].set_ylabel("error of the fit")
    figure.suptitle(f"Collectives over {axis}")
    return figure


def _dots(plot: Axes, own: Sequence[Compared], all_seconds: dict[Point, list[float]], unit: float, colour: str) -> None:
    for one in own:
        seconds = all_seconds[one.point]
        plot.plot([_size(one.point)] * len(seconds), seconds, ".", color="#bbb", markersize=3, zorder=1)
        face = "white" if one.point.held_out else colour
        plot.plot(_size(one.point), one.measured_s * unit, "o", color=colour, markerfacecolor=face, markersize=6)


def _error(plot: Axes, own: Sequence[Compared], colour: str) -> None:
    plot.axhline(0.0, color="#888", linewidth=0.8)
    plot.axhspan(-0.2, 0.2, color="#eee")
    for one in own:
        face = "white" if one.point.held_out else colour
        plot.plot(_size(one.point), one.error, "o", color=colour, markerfacecolor=face, markersize=4)
    plot.set_ylim(-1.0, 1.0)


def _kernels(profile: Profile, samples: Samples, compared: Sequence[Compared]) -> Figure:
    """Rates: of kernels that compute over their flops, of those that stream over their bytes."""
    own = [one for one in compared if isinstance(one.point, KernelPoint)]
    figure = Figure(figsize=(13.0, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _rates(left, [one for one in own if _computes(one.point)], profile, 1e9)
    left.set(xlabel="flops", ylabel="GFLOP/s", title="Products, attention, convolution")
    _rates(right, [one for one in own if not _computes(one.point)], profile, 1e9)
    right.set(xlabel="bytes read and written", ylabel="GB/s", title="Kernels that stream")
    return figure


def _rates(plot: Axes, own: Sequence[Compared], profile: Profile, unit: float) -> None:
    for colour, (label, group) in zip(_COLOURS * 2, _labelled(own)):
        for one in group:
            face = "white" if one.point.held_out else colour
            size = _size(one.point)
            plot.loglog(size, size / one.measured_s / unit, "o", color=colour, markerfacecolor=face, markersize=4)
        fitted = sorted((_size(one.point), _size(one.point) / one.predicted_s / unit) for one in group)
        plot.loglog([x for x, _ in fitted], [y for _, y in fitted], color=colour, label=label, linewidth=1.0)
    plot.legend(fontsize="small")


def _labelled(own: Sequence[Compared]) -> Iterator[tuple[str, list[Compared]]]:
    names = dict.fromkeys((one.point.name, one.point.dtype) for one in own if isinstance(one.point, KernelPoint))
    for name, dtype in names:
        group = [c for c in own if isinstance(c.point, KernelPoint) and (c.point.name, c.point.dtype) == (name, dtype)]
        yield f"{name} {dtype}", group


def _computes(point: Point) -> bool:
    return point.kind in ("matmul", "attention", "convolution")


def _size(point: Point) -> float:
    if isinstance(point, CollectivePoint):
        return float(point.size_bytes)
    return point.flops if _computes(point) else point.bytes_moved


def _between(sizes: Sequence[float]) -> list[float]:
    """The sizes and points between them, evenly on a logarithmic scale."""
    low, high = min(sizes), max(sizes)
    return [low * (high / low) ** (step / 200) for step in range(201)] if high > low else [low]
