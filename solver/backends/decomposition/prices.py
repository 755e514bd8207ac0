"""Prices on memory: what a byte costs per time step, and the usage over time that they answer to.

With prices y_t >= 0 per unit of the limit, the Lagrangian  energy + sum_t y_t (usage_t / limit - 1)  is a pairwise
energy again: a load adds usages[s] / limit * (sum of y over its interval) to its node's costs. Its least value bounds
the problem from below, and the usage of its minimiser tells which prices to raise. Source: Held, Wolfe and Crowder,
"Validation of subgradient optimization", 1974; Polyak's step towards a target.
"""

from __future__ import annotations

import numpy as np

from ...problem import Problem
from .pairwise import FloatArray, IntArray, Pairwise


class Loads:
    """All loads of a problem, flat. Usages are kept in bytes, exact, and in parts of the limit."""

    def __init__(self, problem: Problem, energy: Pairwise) -> None:
        assert problem.usage_limit is not None
        self.limit = problem.usage_limit
        self.unit = max(1, self.limit)
        self.limit_parts = self.limit / self.unit
        # With a soft limit the bytes over it cost the usage price, so the prices of all steps together cannot be more.
        self.most = np.inf if problem.usage_price is None else float(problem.usage_price) * self.unit
        self.energy = energy
        entries = [
            (lo, hi, int(energy.first[number]), node, usages)
            for number, node in enumerate(energy.order.tolist())
            for (lo, hi), usages in problem.nodes[node].loads
        ]
        self.lo = np.array([lo for lo, *_ in entries], np.int64)
        self.hi = np.array([hi for _, hi, *_ in entries], np.int64)
        self.steps = int(self.hi.max(initial=0))
        sizes = np.array([len(usages) for *_, usages in entries], np.int64)
        self.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.first = np.array([first for _, _, first, _, _ in entries], np.int64)
        self.load = np.repeat(np.arange(len(entries)), sizes)
        self.positions = np.arange(len(self.load)) - np.repeat(self.starts[:-1] - self.first, sizes)
        self.bytes = np.concatenate([usages for *_, usages in entries]) if entries else np.zeros(0, np.int64)
        self.parts = self.bytes / self.unit
        self.node = np.searchsorted(energy.first, self.first, side="right") - 1

    def priced(self, prices: FloatArray) -> FloatArray:
        """Per flat position, what its memory costs at the prices (T,)."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        weights = (total[self.hi] - total[self.lo])[self.load] * self.parts
        # With no weights at all bincount counts in integers.
        return np.bincount(self.positions, weights, minlength=len(self.energy.costs)).astype(np.float64)

    def expected(self, shares: FloatArray) -> FloatArray:
        """(T,) usage as a part of the limit when each position is chosen to the given share."""
        used = np.bincount(self.load, shares[self.positions] * self.parts, minlength=len(self.lo))
        return self._over_time(used.astype(np.float64))

    def allowed(self, prices: FloatArray) -> FloatArray:
        """The prices, scaled down to `most` where they are more together: only then is their bound valid."""
        total = float(prices.sum())
        return prices if total <= self.most else prices * (self.most / total * (1 - 1e-12))

    def usage(self, chosen: IntArray) -> IntArray:
        """(T,) bytes in use at each step for the chosen strategies (N,), exact."""
        used = self.bytes[self.starts[:-1] + chosen[self.node]]
        changes = np.zeros(self.steps + 1, np.int64)
        np.add.at(changes, self.lo, used)
        np.subtract.at(changes, self.hi, used)
        return np.cumsum(changes)[: self.steps]

    def _over_time(self, used: FloatArray) -> FloatArray:
        changes = np.bincount(self.lo, used, minlength=self.steps + 1) - np.bincount(
            self.hi, used, minlength=self.steps + 1
        )
        return np.cumsum(changes)[: self.steps]
