"""Charts as values: where dots, lines and ticks stand in a picture. ``templates/chart.svg`` draws them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Mark = Literal["sample", "fitted", "held out"]
"""A dot: of one repetition, of a median that was fitted, of one that was held out of the fit (drawn as a ring)."""

COLOURS = (
    *("#0072b2", "#d97900", "#009e73", "#b0508a", "#6a5f00"),
    *("#56b4e9", "#c04a00", "#5b5bb0", "#4d4d4d", "#00795a"),
)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Tick:
    """A labelled place on an axis, in pixels."""

    at: float
    label: str


@dataclass(frozen=True)
class Scale:
    """An axis: values from ``low`` to ``high`` lie between two pixels, evenly or by their logarithms; the values 1, 2
    and so on may have ``names``, which stand in the place of numbers.

    >>> Scale(1.0, 100.0, 0.0, 200.0).at(10.0)
    100.0
    """

    low: float
    high: float
    first_px: float
    last_px: float
    logarithmic: bool = True
    names: tuple[str, ...] = ()

    def at(self, value: float) -> float:
        """The pixel at which a value is drawn; a value outside of the axis is drawn at its end."""
        low, high, value = (self._linear(v) for v in (self.low, self.high, min(max(value, self.low), self.high)))
        return round(self.first_px + (self.last_px - self.first_px) * (value - low) / (high - low), 1)

    def ticks(self) -> tuple[Tick, ...]:
        """The powers of ten on a logarithmic axis, with their doubles and fives where there are few; else the ends and
        the middle; or the names.
        """
        if self.names:
            return tuple(Tick(self.at(place), name) for place, name in enumerate(self.names, 1))
        if not self.logarithmic:
            return tuple(Tick(self.at(v), f"{v:g}") for v in (self.low, (self.low + self.high) / 2, self.high))
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        factors = (1,) if self.high / self.low > 100 else (1, 2, 5)
        values = [(factor, decade) for decade in decades for factor in factors]
        return tuple(
            Tick(self.at(factor * 10.0**decade), _label(factor, decade))
            for factor, decade in values
            if self.low <= factor * 10.0**decade <= self.high
        )

    def _linear(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value


def spanning(values: Iterable[float], first_px: float, last_px: float) -> Scale:
    """A logarithmic axis on which all values, each above 0, have some room around them."""
    found = list(values)
    return Scale(min(found) / 1.5, max(found) * 1.5, first_px, last_px)


@dataclass(frozen=True)
class Dot:
    """A dot of a panel, in pixels."""

    x: float
    y: float
    mark: Mark
    colour: str


@dataclass(frozen=True)
class Line:
    """A line of a panel: its points as SVG writes them, ``"0,1 2,3"``; ``label`` is what the legend says of it."""

    points: str
    colour: str
    label: str = ""


@dataclass(frozen=True)
class Panel:
    """One plot with its axes.

    Attributes:
        band: a range of the y axis, in values, that is shaded.
        named_y: whether the label and the numbers of the y axis are written: not where the panel to the left has them.
    """

    x: Scale
    y: Scale
    dots: tuple[Dot, ...] = ()
    lines: tuple[Line, ...] = ()
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    band: tuple[float, float] | None = None
    named_y: bool = True

    @property
    def legend(self) -> tuple[Line, ...]:
        """The lines that have a label."""
        return tuple(line for line in self.lines if line.label)

    def dot(self, x: float, y: float, mark: Mark, colour: str) -> Dot:
        """A dot at values of the two axes."""
        return Dot(self.x.at(x), self.y.at(y), mark, colour)

    def line(self, values: Sequence[tuple[float, float]], colour: str, label: str = "") -> Line:
        """A line through pairs of values of the two axes."""
        return Line(" ".join(f"{self.x.at(x)},{self.y.at(y)}" for x, y in values), colour, label)


@dataclass(frozen=True)
class Picture:
    """Panels side by side; ``name`` is that of its file without the suffix, sizes are pixels."""

    name: str
    title: str
    width: float
    height: float
    panels: tuple[Panel, ...]


def _label(factor: int, decade: int) -> str:
    """``20`` or ``0.5``, and beyond the numbers that are short, ``10⁶`` or ``2·10⁶``."""
    if -3 < decade < 3:
        return f"{factor * 10.0**decade:g}"
    power = "10" + str(decade).translate(_SUPERSCRIPTS)
    return power if factor == 1 else f"{factor}·{power}"
