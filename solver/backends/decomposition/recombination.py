"""Joins assignments that fit memory differently well into the best mixture of them.

At prices a little below the best ones the rounded messages use more memory than there is, a little above them less, and
whole regions of the graph differ. Which regions to switch is a knapsack that coordinate descent and windows see badly,
as each switch moves many nodes at once. So the nodes keep the strategies that any of the assignments chose, which are
few, and branch and cut solves what the reductions leave of that. Source: crossover as a sub-problem, Rothberg, "An
evolutionary algorithm for polishing mixed integer programming solutions", 2007.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from ...networks import Assignment
from ...problem import IntArray, Problem
from ...reductions import Chain, reduce
from ...reductions.restrict import restrict
from ..backend import Request
from ..lazy import run_lazily
from ..mathopt import MathOpt
from .descent import Descent
from .dual import Dual
from .prices import Loads
from .shared import Shared

FACTORS = (0.95, 1.05, 0.9, 1.1, 0.8, 1.2, 0.7, 1.4, 0.5, 2.0)
"""Of the prices, nearest to 1 first."""

PASSES = 60
POOL_SHARE = 0.1
SOLVE_SHARE = 0.25
SOLVE_S = 60.0
GAP = 1e-6
MOST_PAIRS = 100_000


@dataclass(frozen=True, eq=False)
class Recombination:
    """Recombines assignments from scaled prices with the best one."""

    problem: Problem
    dual: Dual
    descent: Descent
    loads: Loads
    shared: Shared

    def run(self, pass_s: float) -> None:
        """Builds the pool, each member by at most PASSES passes of about `pass_s` seconds, and offers the mixture."""
        if self.shared.best is None or not self.dual.prices.any():
            return
        pool = self._pool(pass_s)
        while pool and not self.shared.stop.is_set():
            best = np.array(self.shared.best.choices, np.int64)[self.descent.energy.order]
            reduced = restrict(self.problem, self._union([best, *pool]))
            chain = reduce(reduced.problem)
            if not isinstance(chain, Chain):
                return
            if sum(edge.costs.size for edge in chain.problem.edges) <= MOST_PAIRS:
                lowered = chain.lower(reduced.way_back.lower(self.shared.best))
                found = self._solved(chain, lowered)
                if found is not None:
                    self.shared.offer_assignment(reduced.way_back.lift(found))
                return
            pool = pool[: len(pool) // 2]

    def _pool(self, pass_s: float) -> list[IntArray]:
        """Settled roundings at scaled prices. Leaves the messages at the prices of the dual."""
        left_s = self.shared.request.seconds_left()
        passes = PASSES
        if left_s is not None:
            passes = min(PASSES, int(POOL_SHARE * left_s / (len(FACTORS) * max(pass_s, 1e-6))))
        messages, pool = self.dual.messages, []
        for factor in FACTORS:
            if self.shared.stop.is_set():
                break
            messages.set_costs(self.descent.energy.costs + self.loads.priced(self.dual.prices * factor))
            for _ in range(passes):
                messages.sweep()
            pool.append(self.descent.settled(self.descent.rounded(messages), messages.costs))
        messages.set_costs(self.descent.energy.costs + self.loads.priced(self.dual.prices))
        return pool

    def _union(self, pool: list[IntArray]) -> list[IntArray | None]:
        chosen = np.stack(pool)
        keep: list[IntArray | None] = [None] * len(self.problem.nodes)
        for number, node in enumerate(self.descent.energy.order.tolist()):
            keep[node] = np.unique(chosen[:, number])
        return keep

    def _solved(self, chain: Chain, start: Assignment) -> Assignment | None:
        if not chain.problem.nodes:
            return chain.lift(Assignment(()))
        left_s = self.shared.request.seconds_left()
        limit_s = SOLVE_S if left_s is None else min(SOLVE_S, SOLVE_SHARE * left_s)
        request = Request(time.monotonic() + limit_s, GAP, self.shared.request.seed, start)
        answer = run_lazily(MathOpt("HIGHS"), chain.problem, request)
        return None if answer.assignment is None else chain.lift(answer.assignment)
