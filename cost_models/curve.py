"""Piecewise linear curves: seconds over bytes, or full-rate amounts over amounts.

A curve runs from the origin through its knots and goes on with the slope ``tail``; between two knots it is straight. So
it is continuous (both sides of a knot give the knot's own value), zero at zero, and, as its knots never fall, never
falls itself. These are the laws every price inherits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .amounts import Amount, Array

Knots = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curve:
    """A function through the origin and ``knots``, straight in between, of slope ``tail`` beyond the last knot.

    Invariants (checked where a profile file is read): knots rise strictly in the first coordinate, from above 0, and
    never fall in the second; ``tail`` is positive.
    """

    knots: Knots
    tail: float

    @classmethod
    def through(cls, knots: Iterable[tuple[float, float]]) -> Curve:
        """The curve that goes on beyond its last knot with the slope of its last segment."""
        points = [(0.0, 0.0), *((float(x), float(y)) for x, y in knots)]
        (x0, y0), (x1, y1) = points[-2:]
        return cls(tuple(points[1:]), (y1 - y0) / (x1 - x0))

    @classmethod
    def of_efficiency(cls, knots: Iterable[tuple[float, float]]) -> Curve:
        """``amount / share(amount)`` for knots of (amount, share): the amount that takes as long at the full rate.

        The share is that of the first knot below it and that of the last one beyond it.
        """
        pairs = list(knots)
        return cls(tuple((float(x), x / share) for x, share in pairs), 1.0 / pairs[-1][1])

    def __call__(self, amount: Amount) -> Amount:
        """The value at one amount, or at each of an array."""
        xs, ys, slopes = self._segments
        if isinstance(amount, np.ndarray):
            at = np.searchsorted(xs, amount, side="right") - 1
            values: Array = ys[at] + slopes[at] * (amount - xs[at])
            return values
        i = bisect_right(self._starts, amount) - 1
        return float(ys[i] + slopes[i] * (amount - xs[i]))

    def highest(self, other: Curve) -> Curve:
        """The larger of two curves at every amount; exact: where they cross between knots, it has a knot."""
        xs = sorted({x for x, _ in self.knots} | {x for x, _ in other.knots})
        crossings = {x for pair in zip([0.0, *xs], [*xs, np.inf]) for x in _crossing(self, other, *pair)}
        knots = tuple((x, float(max(self(x), other(x)))) for x in sorted(crossings.union(xs)))
        return Curve(knots, max(self.tail, other.tail))

    def scaled(self, factor: float) -> Curve:
        """The curve with every value times ``factor``."""
        return Curve(tuple((x, y * factor) for x, y in self.knots), self.tail * factor)

    @cached_property
    def _starts(self) -> tuple[float, ...]:
        return (0.0, *(x for x, _ in self.knots))

    @cached_property
    def _segments(self) -> tuple[Array, Array, Array]:
        """Of each segment: where it starts, its value there, its slope."""
        points = np.array([(0.0, 0.0), *self.knots])
        slopes = np.append(np.diff(points[:, 1]) / np.diff(points[:, 0]), self.tail)
        return points[:, 0], points[:, 1], slopes


def _crossing(one: Curve, other: Curve, start: float, stop: float) -> list[float]:
    """Where two curves that are straight on a stretch cross inside it."""
    gap = float(one(start) - other(start))
    slope = _slope(one, start) - _slope(other, start)
    if gap * slope >= 0:
        return []
    x = start - gap / slope
    return [x] if start < x < stop else []


def _slope(curve: Curve, x: float) -> float:
    return float(curve._segments[2][bisect_right(curve._starts, x) - 1])
