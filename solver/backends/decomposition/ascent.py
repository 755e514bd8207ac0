"""The dual ascent of one search, with its messages rounded to assignments now and then. Needs numpy alone."""

from __future__ import annotations

import time

import numpy as np

from ...networks import Assignment
from ...problem import IntArray, Problem
from ...reductions.compact import compact_edges
from ...reductions.reduction import Reduced
from ..backend import Answer, Request
from .descent import Descent
from .dual import Dual
from .pairwise import Pairwise, build_pairwise
from .prices import Loads
from .shared import Shared

PASSES = 3000
FEWEST_PASSES = 300
PASSES_PER_ROUNDING = 25
ASCENT_SHARE = 0.6
ANY_GAP = 1e18


class Ascent:
    """The dual of a problem with compact edges, whose energy is given, and the rounding of its messages."""

    def __init__(self, energy: Pairwise, shared: Shared) -> None:
        self.problem = problem = shared.problem
        self.shared = shared
        self.energy = energy
        self.loads = None if problem.usage_limit is None else Loads(problem, energy)
        self.dual = Dual(energy, self.loads, problem.offset)
        self.descent = Descent(self.energy, self.loads, shared.request.ended)
        self.pass_s = 0.0

    def run(self) -> None:
        """Advances the dual for PASSES passes or its share of the time, until it stalls or proves infeasibility.

        A problem of fewer strategies gets fewer passes, one for each above FEWEST_PASSES.
        """
        started_s, left_s = time.monotonic(), self.shared.request.seconds_left()
        most_passes = min(PASSES, FEWEST_PASSES + self.problem.strategies)
        progress, next_rounding = 0.0, 1
        while progress < 1 and not self.dual.stalled and not self.shared.request.ended():
            self.dual.advance(progress)
            progress = self.dual.passes / most_passes
            if left_s is not None:
                progress = max(progress, (time.monotonic() - started_s) / (ASCENT_SHARE * left_s + 1e-9))
            if self.dual.bound > self.energy.most + self.problem.offset and self.problem.usage_price is None:
                # No assignment costs so much: the prices on memory can rise for ever.
                self.shared.take(Answer(infeasible=True))
                self.shared.stop.set()
            elif self.dual.passes >= next_rounding or progress >= 1 or self.dual.stalled:
                next_rounding = self.dual.passes + min(self.dual.passes, PASSES_PER_ROUNDING)
                self.shared.raise_bound(self.dual.bound)
                self._round()
        self.pass_s = (time.monotonic() - started_s) / max(1, self.dual.passes)

    def _round(self) -> None:
        """Offers the rounded messages."""
        messages = self.dual.messages
        self.offer(self.descent.settled(self.descent.rounded(messages), messages.costs), abs(self.dual.bound))

    def offer(self, chosen: IntArray, scale: float) -> None:
        """Offers the assignment `chosen` (N,), in the numbering of the energy, repaired to fit a hard limit.

        scale: of the costs; the prices of memory are raised from a part of it.
        """
        if self.problem.usage_price is None:
            prices = self.dual.prices
            scale = max(scale, self.energy.most / len(chosen))  # a bound may be near 0
            fitting = self.descent.repaired(chosen, prices, float(prices.sum()) + scale)
            if fitting is None:
                return
            chosen = fitting
        cost = self.shared.cost
        if cost is None or self.descent.cost(chosen) + self.problem.offset < cost:
            choices = np.empty_like(chosen)
            choices[self.energy.order] = chosen
            self.shared.offer(tuple(choices.tolist()))


def compacted(problem: Problem) -> Problem:
    """The problem with compact edge matrices, as an ascent needs them; its assignments are the same."""
    compact = compact_edges(problem)
    return compact.problem if isinstance(compact, Reduced) else problem


def first_answer(problem: Problem, seconds: float) -> Answer:
    """The first feasible assignment that an ascent rounds to, and the bound of then.

    seconds: after which it gives up, beside what it takes to build the arrays.
    """
    ascent = _ascent(problem, seconds)
    ascent.run()
    return ascent.shared.answer()


def repaired(problem: Problem, choices: tuple[int, ...], seconds: float) -> Assignment | None:
    """The assignment, moved until it keeps the usage limit; None if it does not in so many seconds."""
    ascent = _ascent(problem, seconds)
    chosen = np.array(choices, np.int64)[ascent.energy.order]
    ascent.offer(chosen, abs(ascent.descent.cost(chosen)))
    return ascent.shared.best


def _ascent(problem: Problem, seconds: float) -> Ascent:
    problem = compacted(problem)
    energy = build_pairwise(problem)
    return Ascent(energy, Shared(problem, Request(time.monotonic() + seconds, ANY_GAP)))
