"""Assignments from messages and prices: rounding, coordinate descent, and raising prices until memory fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from .messages import Messages
from .pairwise import Batch, FloatArray, IntArray, Pairwise
from .prices import Loads

SWEEPS = 10
RAISES = 80
FIRST_RAISE = 0.02
RAISE = 1.2


@dataclass(frozen=True, eq=False)
class Descent:
    """Works on assignments `chosen` (N,): the strategy of each node in the numbering of the energy.

    ended: whether the time is over; sweeps and repairs end then.
    """

    energy: Pairwise
    loads: Loads | None
    ended: Callable[[], bool] = lambda: False

    def rounded(self, messages: Messages) -> IntArray:
        """Colour by colour the least of theta, with the messages of decided neighbours replaced by their true costs."""
        values = messages.theta.copy()
        chosen = np.zeros(len(self.energy.order), np.int64)
        for color in range(len(self.energy.color_starts) - 1):
            self._choose(color, values, chosen)
            for index in messages.forward[color]:
                batch = self.energy.batches[index]
                batch.v.add(values, _given_u(batch, chosen) - messages.to_v[index])
        return chosen

    def settled(self, chosen: IntArray, costs: FloatArray) -> IntArray:
        """Every node in turn takes its best strategy given the others, colour by colour, until none moves.

        costs: node costs at flat positions, prices on memory included.
        """
        chosen = chosen.copy()
        for _ in range(SWEEPS):
            before = chosen.copy()
            for color in range(len(self.energy.color_starts) - 1):
                values = costs.copy()
                for batch in self.energy.batches:
                    if batch.colors[0] == color:
                        batch.u.add(values, _given_v(batch, chosen))
                    elif batch.colors[1] == color:
                        batch.v.add(values, _given_u(batch, chosen))
                self._choose(color, values, chosen)
            if self.ended() or (chosen == before).all():
                break
        return chosen

    def repaired(self, chosen: IntArray, prices: FloatArray, scale: float) -> IntArray | None:
        """Raises the prices of the steps over the limit until the settled assignment fits; None if it never does.

        scale: the first raise, in units of cost; every further one is RAISE times as large.
        """
        if self.loads is None:
            return chosen
        prices, raised = prices.copy(), FIRST_RAISE * scale
        for _ in range(RAISES):
            over = np.maximum(0.0, (self.loads.usage(chosen) - self.loads.limit) / self.loads.unit)
            if not over.any():
                return chosen
            if self.ended():
                return None
            prices += raised * over / (over.max() * np.count_nonzero(over) ** 0.5)
            raised *= RAISE
            chosen = self.settled(chosen, self.energy.costs + self.loads.priced(prices))
        return None

    def cost(self, chosen: IntArray) -> float:
        """The energy of the assignment, without prices."""
        total = float(self.energy.costs[self.energy.first[:-1] + chosen].sum())
        for batch in self.energy.batches:
            rows, cols = batch.u.chosen_class(chosen), batch.v.chosen_class(chosen)
            total += float(batch.costs[rows, cols, np.arange(len(rows))].sum())
        return total

    def _choose(self, color: int, values: FloatArray, chosen: IntArray) -> None:
        lo, hi = self.energy.color_starts[color : color + 2]
        first = self.energy.first[lo : hi + 1]
        here = values[first[0] : first[-1]]
        least = np.repeat(np.minimum.reduceat(here, first[:-1] - first[0]), np.diff(first))
        at = np.flatnonzero(here == least)
        node = np.searchsorted(first, at + first[0], side="right") - 1
        _, earliest = np.unique(node, return_index=True)
        chosen[lo:hi] = at[earliest] + first[0] - first[:-1]


def _given_u(batch: Batch, chosen: IntArray) -> FloatArray:
    """(C, B): costs of the columns for the chosen rows."""
    rows = batch.u.chosen_class(chosen)
    return batch.costs[rows, :, np.arange(len(rows))].T


def _given_v(batch: Batch, chosen: IntArray) -> FloatArray:
    """(R, B): costs of the rows for the chosen columns."""
    cols = batch.v.chosen_class(chosen)
    return batch.costs[:, cols, np.arange(len(cols))]
