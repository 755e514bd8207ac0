"""Dual ascent: passes of messages and steps of the prices on memory in turn, each giving a valid lower bound.

The subgradient of the bound in the prices is the usage of a minimiser less the limit. Nodes tied between several least
strategies are shared evenly, and shares are averaged over the last passes, which damps the swings of single minimisers
(the volume algorithm; Barahona and Anbil, 2000). A step aims TARGET above the best bound (Polyak), scaled down from 1
to LAST_STEP geometrically as the ascent progresses, and changes the prices by at most LARGEST_CHANGE of their total.
Messages and prices ascend together: steps that shrink too fast leave both at a point that neither improves alone.
(Measured on the instances M and S of IOPDDL: 800 passes of this schedule end 0.2% higher than adaptive ones.)
"""

from __future__ import annotations

import numpy as np

from .messages import Messages
from .pairwise import FloatArray, Pairwise
from .prices import Loads

TARGET = 0.05
LARGEST_CHANGE = 0.1
LAST_STEP = 1e-4
AVERAGING = 0.1
WARM_UP = 5
STALLED_PASSES = 200
STALLED_GAIN = 1e-6
RESOLUTION = 1e-9


class Dual:
    """The state of the ascent. `bound` is the best bound so far."""

    def __init__(self, energy: Pairwise, loads: Loads | None, offset: int) -> None:
        self.energy = energy
        self.loads = loads
        self.offset = offset
        self.messages = Messages(energy)
        self.prices = np.zeros(loads.steps if loads is not None else 0)
        self.bound = -np.inf
        self.passes = 0
        self.shares: FloatArray | None = None
        self._progress = 0.0
        self._milestone = (0, -np.inf)

    @property
    def stalled(self) -> bool:
        """Whether the last STALLED_PASSES passes gained next to nothing. The large steps of the start may do so."""
        settled = self.loads is None or self._progress > 0.9
        return settled and self.passes - self._milestone[0] >= STALLED_PASSES

    def advance(self, progress: float) -> None:
        """One pass forward, one backward, and one step of the prices; progress from 0 to 1 sets its size."""
        paid = 0.0 if self.loads is None else float(self.prices.sum()) * self.loads.limit_parts
        found = self.messages.sweep() - paid
        # The sums behind `found` carry a relative error; RESOLUTION is far above it.
        found += self.offset - RESOLUTION * (abs(found) + paid)
        self.bound = max(self.bound, found)
        self.passes += 1
        self._progress = progress
        if not self.bound <= self._milestone[1] + STALLED_GAIN * abs(self._milestone[1]):
            self._milestone = (self.passes, self.bound)
        if self.loads is not None and self.passes >= WARM_UP:
            self.prices = self._next_prices(self.loads, LAST_STEP ** min(1.0, progress))
            self.messages.set_costs(self.energy.costs + self.loads.priced(self.prices))

    def _next_prices(self, loads: Loads, step: float) -> FloatArray:
        shares = self._least_shares()
        self.shares = shares if self.shares is None else (1 - AVERAGING) * self.shares + AVERAGING * shares
        excess = loads.expected(self.shares) - loads.limit_parts
        active = excess[(excess > 0) | (self.prices > 0)]
        if not active.any():
            return self.prices
        aim = TARGET * max(1.0, abs(self.bound))
        polyak = step * aim / float(active @ active)
        cap = LARGEST_CHANGE * (float(self.prices.sum()) + aim) / float(np.abs(active).sum())
        return loads.allowed(np.maximum(0.0, self.prices + min(polyak, cap) * excess))

    def _least_shares(self) -> FloatArray:
        """Per flat position its share of its node: even over the least entries of theta, 0 elsewhere."""
        messages = self.messages
        least = np.repeat(messages.least(), messages.lengths)
        is_least = (messages.theta <= least + 1e-9 * np.abs(least) + 1e-3).astype(np.float64)
        shares: FloatArray = is_least / np.repeat(np.add.reduceat(is_least, self.energy.first[:-1]), messages.lengths)
        return shares
