"""A search over meshes as pictures: the step of each mesh, and the rate over the number of devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..measure.chart import COLOURS, Panel, Picture, Scale, spanning
from .rows import rows_of, scaling_of
from .search import MeshSearch

# Pixels.
NAMES, WIDTH, ROW, TOP, BOTTOM, LEGEND, RATES = 230.0, 480.0, 22.0, 46.0, 50.0, 190.0, 320.0
NEAR = 4
"""Up to which ratio of the largest to the smallest an axis starts at zero."""
PLANNED, CUT = COLOURS[0], COLOURS[1]


def mesh_picture(search: MeshSearch) -> Picture:
    """A line for each mesh that has a plan or a bound, the best on top: a dot at its step, a ring at the bound of one
    that was cut; of several batches milliseconds of a sample.
    """
    several = len({each.samples for each in search.candidates}) > 1
    drawn = [
        (row, each.cost_per_sample / 1e6 * (1 if several else each.samples))
        for row, each in zip(rows_of(search), search.candidates)
        if each.verdict in ("best", "slower", "cut") and each.cost_per_sample > 0
    ]
    names = tuple(f"{row.mesh}, {row.batch} samples" if several else row.mesh for row, _ in reversed(drawn))
    height = ROW * len(drawn)
    y = Scale(0.5, len(drawn) + 0.5, TOP + height, TOP, logarithmic=False, names=names)
    x = _milliseconds([value for _, value in drawn])
    panel = Panel(x, y, x_label=f"milliseconds of a {'sample' if several else 'step'}")
    dots, lines = [], []
    said: set[str] = set()
    for place, (row, value) in zip(range(len(drawn), 0, -1), drawn):
        is_cut = row.verdict == "cut"
        colour, label = (CUT, "cut: at least that") if is_cut else (PLANNED, "planned")
        dots.append(panel.dot(value, place, "held out" if is_cut else "fitted", colour))
        lines.append(panel.line([(x.low, place), (value, place)], colour, "" if label in said else label))
        said.add(label)
    panel = replace(panel, dots=tuple(dots), lines=tuple(lines))
    title = f"Meshes of {search.devices} devices"
    return Picture(f"meshes-{search.devices}", title, NAMES + WIDTH + LEGEND, TOP + height + BOTTOM, (panel,))


def _milliseconds(values: Sequence[float]) -> Scale:
    """From zero on where values are near one another, else by their logarithms."""
    if max(values) > NEAR * min(values):
        return spanning(values, NAMES, NAMES + WIDTH)
    power = 10.0 ** math.floor(math.log10(max(values)))
    end = next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= max(values))
    return Scale(0.0, end, NAMES, NAMES + WIDTH, logarithmic=False)


def scaling_picture(searches: Sequence[MeshSearch]) -> Picture | None:
    """The rate of the best mesh over the number of devices, beside as many times that of the fewest; None where there
    are fewer than two numbers, or rates are not known.
    """
    rows = [row for row in scaling_of(searches) if row.per_s is not None]
    rates = [(float(row.devices), row.per_s) for row in rows if row.per_s is not None]
    if len(rates) < 2:
        return None
    ideal = [(devices, rates[0][1] * devices / rates[0][0]) for devices, _ in rates]
    x = spanning((devices for devices, _ in rates), NAMES / 2, NAMES / 2 + WIDTH)
    y = spanning((rate for _, rate in (*rates, *ideal)), TOP + RATES, TOP)
    panel = Panel(x, y, x_label="devices", y_label=f"{rows[0].unit} a second")
    dots = tuple(panel.dot(devices, rate, "fitted", PLANNED) for devices, rate in rates)
    lines = (panel.line(rates, PLANNED, "the best mesh"), panel.line(ideal, CUT, "as many times the first"))
    width, height = NAMES / 2 + WIDTH + LEGEND, TOP + RATES + BOTTOM
    return Picture("scaling", "Scaling", width, height, (replace(panel, dots=dots, lines=lines),))
