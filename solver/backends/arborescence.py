"""The least cost of a network's routes where a price stands on each of its ends.

Routes lead from the vertex at which a tensor is made to one vertex for each consumer, arcs that several need paid once:
an arborescence. If it may start and end anywhere, for a price that depends on the vertex, two tables say all:

    down[T][v]   the least cost of leading from v to all consumers of the set T, their prices included
    up[T][v]     the same of leading from the producer to v and, on the way, to all consumers of T

    down[T] = nearest(min over the parts U of T of down[U] + down[T - U])       the ways part
    up[T]   = nearest(min over the parts U of T of up[T - U] + down[U])

where `nearest` lets arcs be taken first (last). It is Dreyfus and Wagner's recursion with free ends, which costs
3^k additions of arrays over the vertices for k consumers. Source: Dreyfus and Wagner, "The Steiner problem in graphs",
1971.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from ..problem import IntArray

FloatArray = npt.NDArray[np.float64]

FAR = 1e30
"""What no finite cost comes near: of what cannot be reached."""


class Ways:
    """Arcs in one direction: what is known of their starts is passed on to their ends."""

    def __init__(self, starts: IntArray, ends: IntArray, costs: FloatArray) -> None:
        order = np.argsort(ends, kind="stable")
        ends = ends[order]
        self._starts, self._costs = starts[order], costs[order]
        self._first = np.flatnonzero(np.diff(ends, prepend=-1))
        self._ends = ends[self._first]

    def nearest(self, values: FloatArray) -> FloatArray:
        """Per vertex v the least of `values[w]` plus a way from w to v."""
        values = values.copy()
        while len(self._ends):
            known = values[self._ends]
            found = np.minimum.reduceat(values[self._starts] + self._costs, self._first)
            if not np.count_nonzero(found < known):
                break
            values[self._ends] = np.minimum(known, found)
        return values


class Arborescence:
    """Routes with a price for each end at each vertex; end 0 is where the tensor is made, the others want it.

    Args:
        vertices: V.
        forwards, backwards: the arcs, towards their heads and towards their tails.
    """

    def __init__(self, vertices: int, forwards: Ways, backwards: Ways, ends: int) -> None:
        self._forwards, self._backwards = forwards, backwards
        self._far = np.full(vertices, FAR)
        self._prices = [self._far] * ends
        self._versions = [0] * ends
        self._known: dict[tuple[bool, tuple[int, ...]], tuple[tuple[int, ...], FloatArray]] = {}
        self._consumers = tuple(range(1, ends))

    def price(self, end: int, vertices: IntArray, prices: FloatArray) -> None:
        """Sets what an end costs at some vertices, of which none is named twice; it cannot be at any other."""
        self._prices[end] = self._far.copy()
        self._prices[end][vertices] = prices
        self._versions[end] += 1

    def least(self, end: int) -> FloatArray:
        """Per vertex the least cost of routes with the end there, without the price of this end; FAR for none."""
        if end == 0:
            return self._down(self._consumers)
        return self._up(tuple(other for other in self._consumers if other != end))

    def through(self, tails: IntArray, heads: IntArray, costs: FloatArray) -> FloatArray:
        """Per arc the least cost of routes that use it."""
        found = np.full(len(costs), FAR)
        for before, after in _parts(self._consumers, proper=False):
            np.minimum(found, self._up(before)[tails] + self._down(after)[heads], out=found)
        return found + costs

    def _down(self, consumers: tuple[int, ...]) -> FloatArray:
        return self._table(False, consumers)

    def _up(self, consumers: tuple[int, ...]) -> FloatArray:
        return self._table(True, consumers)

    def _table(self, up: bool, consumers: tuple[int, ...]) -> FloatArray:
        version = tuple([self._versions[end] for end in ((0, *consumers) if up else consumers)])
        known = self._known.get((up, consumers))
        if known is None or known[0] != version:
            table = (self._forwards if up else self._backwards).nearest(self._parted(up, consumers))
            self._known[up, consumers] = known = version, table
        return known[1]

    def _parted(self, up: bool, consumers: tuple[int, ...]) -> FloatArray:
        """The table before any arc is taken: prices of one end, or where ways part."""
        if len(consumers) == (0 if up else 1):
            return self._prices[0 if up else consumers[0]]
        best = self._far.copy()
        for rest, part in _parts(consumers, proper=not up):
            np.minimum(best, self._table(up, rest) + self._down(part), out=best)
        return best


@cache
def _parts(consumers: tuple[int, ...], *, proper: bool) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Every split of a set in two, the second not empty. If proper: nor is the first, and of two alike one is named."""
    free: Sequence[int] = consumers[1:] if proper else consumers
    parts = (tuple(end for k, end in enumerate(free) if chosen >> k & 1) for chosen in range(1, 1 << len(free)))
    return tuple((tuple(end for end in consumers if end not in part), part) for part in parts)
