"""Dual ascent: passes of messages and steps of the prices on memory in turn, each giving a valid lower bound.

The subgradient of the bound in the prices is usage / limit - 1 of a minimiser. Nodes tied between several least
strategies are shared evenly, and shares are averaged over the last passes, which damps the swings of single minimisers
(the volume algorithm; Barahona and Anbil, 2000). The step aims TARGET above the best bound (Polyak), but changes the
prices by no more than LARGEST_CHANGE of their total. Without a better bound for PATIENCE passes the ascent goes back to
the best prices with a smaller step. When the step is negligible a new cycle starts from the step RESTART, unless the
cycle gained less than CYCLE_GAIN of the bound: then the ascent has ended.
"""

from __future__ import annotations

import numpy as np

from .messages import Messages
from .pairwise import FloatArray, Pairwise
from .prices import Loads

TARGET = 0.05
LARGEST_CHANGE = 0.1
AVERAGING = 0.1
WARM_UP = 5
PATIENCE = 8
WORTHWHILE = 1e-4
SHRINK = 2.0
NEGLIGIBLE = 1e-5
RESTART = 0.01
CYCLE_GAIN = 2e-5
RESOLUTION = 1e-9


class Dual:
    """The state of the ascent. `bound` is the best bound so far, `ended` whether more passes are of little use."""

    def __init__(self, energy: Pairwise, loads: Loads | None, offset: int) -> None:
        self.energy = energy
        self.loads = loads
        self.offset = offset
        self.messages = Messages(energy)
        self.prices = np.zeros(loads.steps if loads is not None else 0)
        self.best_prices = self.prices
        self.bound = -np.inf
        self.step_size = 1.0
        self.passes = 0
        self.waited = 0
        self.milestone = -np.inf
        self.cycle_start = -np.inf
        self.ended = False
        self.shares: FloatArray | None = None

    def advance(self) -> None:
        """One pass forward, one backward, and one step of the prices."""
        paid = 0.0 if self.loads is None else float(self.prices.sum()) * self.loads.limit_parts
        found = self.messages.sweep() - paid
        # The sums behind `found` carry a relative error; RESOLUTION is far above it.
        found += self.offset - RESOLUTION * (abs(found) + paid)
        if found > self.bound:
            self.bound, self.best_prices = found, self.prices
        self.passes += 1
        self._wait(found)
        if self.loads is not None and self.passes >= WARM_UP:
            self._set_prices(self.loads, self._next_prices(self.loads))

    def _wait(self, found: float) -> None:
        """Counts passes without a worthwhile gain, and shrinks the step after PATIENCE of them."""
        if self.milestone == -np.inf or found > self.milestone + WORTHWHILE * abs(self.milestone):
            self.milestone, self.waited = found, 0
        self.waited += 1
        if self.waited > PATIENCE:
            self.waited = 0
            self.step_size /= SHRINK if self.loads is not None else SHRINK**4
            if self.loads is not None:
                self._set_prices(self.loads, self.best_prices)
            if self.step_size < NEGLIGIBLE:
                self.ended = self.bound < self.cycle_start + CYCLE_GAIN * abs(self.cycle_start)
                self.cycle_start, self.step_size = self.bound, RESTART

    def _next_prices(self, loads: Loads) -> FloatArray:
        shares = self._least_shares()
        self.shares = shares if self.shares is None else (1 - AVERAGING) * self.shares + AVERAGING * shares
        excess = loads.expected(self.shares) - loads.limit_parts
        active = excess[(excess > 0) | (self.prices > 0)]
        if not len(active):
            return self.prices
        aim = TARGET * max(1.0, abs(self.bound))
        polyak = self.step_size * aim / float(active @ active)
        cap = LARGEST_CHANGE * (float(self.prices.sum()) + aim) / float(np.abs(active).sum())
        return loads.allowed(np.maximum(0.0, self.prices + min(polyak, cap) * excess))

    def _set_prices(self, loads: Loads, prices: FloatArray) -> None:
        self.prices = prices
        self.messages.set_costs(self.energy.costs + loads.priced(prices))

    def _least_shares(self) -> FloatArray:
        """Per flat position its share of its node: even over the least entries of theta, 0 elsewhere."""
        messages = self.messages
        least = np.repeat(messages.least(), messages.lengths)
        is_least = (messages.theta <= least + 1e-9 * np.abs(least) + 1e-3).astype(np.float64)
        shares: FloatArray = is_least / np.repeat(np.add.reduceat(is_least, self.energy.first[:-1]), messages.lengths)
        return shares
