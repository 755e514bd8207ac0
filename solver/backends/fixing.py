"""Problems of networks by dual ascent, reduced-cost fixing, and an integer program of what is left.

1. The ascent (:mod:`solver.backends.network_ascent`) finds a bound B, and what every strategy and arc costs at least.
2. What costs no more than B + e makes a small problem, which branch and cut solves: the cost is C.
3. Whatever uses anything else costs more than B + e. So where C <= B + e, C is the optimum; else once more with a
   larger e, that is no larger than C - B.

The last hundredth of the bound takes most sweeps, and more of them the longer the chain of layouts is that a price has
to pass along. So that is done once on the way, with a larger e, where what that leaves is small: Llama-3-8B and 70B on
8x8 are solved after 5 and 6 pairs of sweeps, of 18 and 44 that the ascent would take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil, floor

import numpy as np

from ..evaluate import evaluate
from ..networks import Assignment
from ..problem import IntArray, Problem
from ..reductions import Chain, reduce
from ..reductions.reduction import Pool, Rerouting
from ..reductions.restrict import restrict
from .arborescence import FAR, FloatArray
from .backend import Answer, Request
from .lazy import run_lazily
from .mathopt import MathOpt
from .network_ascent import GAIN, ROUNDING, NetworkAscent, above

NEAR = 1e-4
"""How far above the bound what is looked at first may be, as a part of it."""

EARLY = 1e-2
"""The same on the way, once a pair of sweeps gains less than that."""

MOST_EARLY = 20_000
"""Strategies and arcs of a program that takes less time than the sweeps that are left: 0.2 CPU seconds."""

FURTHER = 10.0
"""How much further above the bound is looked next."""

MOST_LEFT = 0.5
"""A program of more than this part of the strategies and arcs is as hard as the whole."""


def is_of_networks(problem: Problem) -> bool:
    """Whether all that costs are nodes and networks, and nothing is limited."""
    bare = problem.usage_limit is None and not problem.edges and bool(problem.networks)
    return bare and not any(network.is_optional for network in problem.networks)


def run_fixing(problem: Problem, request: Request, most_left: float = MOST_LEFT) -> Answer | None:
    """The optimum of a problem of networks (:func:`is_of_networks`), or what is known when the time ends.

    Args:
        most_left: of strategies and arcs together. Where more would be left the bound is too far from all answers, and
            the result None: the program of what is left is as hard as the whole.
    """
    search = _Search(problem, request)
    ascent = NetworkAscent(problem, search.cutoff)
    size = problem.arcs + problem.strategies
    for gain, near, most in ((EARLY, EARLY, min(MOST_EARLY, most_left * size)), (GAIN, NEAR, most_left * size)):
        ascent.run(lambda bound: search.proved(_integer(bound)), gain)
        if ascent.is_impossible:
            return search.nothing_below()
        if search.proved(_integer(ascent.bound)) or search.near(ascent, near, most):
            return search.known
        ascent.cutoff = search.cutoff
    return None


class _Search:
    """The best that is known of a problem.

    Attributes:
        cost: of the best answer; FAR without one.
    """

    def __init__(self, problem: Problem, request: Request) -> None:
        self.known, self.cost = Answer(), FAR
        self._problem, self._request = problem, request
        if request.start is not None:
            self.take(Answer().with_assignment(request.start))

    def near(self, ascent: NetworkAscent, near: float, most: float) -> bool:
        """Looks at what costs little more than the bound, and further, until the optimum or the time ends that: then it
        is true. False where that would be of more than ``most`` strategies and arcs.

        Args:
            near: how much more, as a part of the bound.
        """
        arcs, bound = ascent.arcs(), ascent.bound
        limit = bound + near * max(1.0, abs(bound))
        while True:
            limit = min(limit, self.cutoff)
            strategies = ascent.strategies(limit)
            found = Answer(infeasible=True)
            if all(map(len, strategies)):  # a node of which all cost more leaves nothing
                part = _within(self._problem, strategies, arcs, limit)
                if part.problem.arcs + part.problem.strategies > most:
                    return False
                found = _optimum(part, self._request)
            if found.infeasible and limit == self.cutoff:
                self.known = self.nothing_below()
                return True
            self.take(found)
            if not found.infeasible and found.bound is None:  # the time has ended before anything was known of the part
                return True
            others = floor(limit)  # what is not in the part costs more
            if self.proved(others if found.bound is None else min(others, found.bound)):
                return True
            if not found.infeasible and (found.choices is None or limit == self.cutoff):
                return True
            self._request.on_answer(self.known)
            limit = bound + FURTHER * (limit - bound)

    @property
    def cutoff(self) -> float:
        """What costs more is of no interest."""
        return min(self.cost, FAR if self._request.cutoff is None else self._request.cutoff)

    def take(self, found: Answer) -> None:
        """Notes an assignment, if it is one of the problem and the best so far."""
        if found.assignment is None:
            return
        judged = evaluate(self._problem, *found.assignment)
        if judged.feasible and judged.cost < self.cost:
            self.known, self.cost = self.known.with_assignment(found.assignment), judged.cost

    def nothing_below(self) -> Answer:
        """What is known once nothing costs less than the cutoff."""
        if self.cutoff == FAR:
            return Answer(infeasible=True)
        self.proved(int(self.cutoff))
        return self.known

    def proved(self, bound: int) -> bool:
        """Notes a bound; whether that, or the time, is the end."""
        bound = bound if self.cost == FAR else min(bound, int(self.cost))
        self.known = replace(self.known, bound=bound if self.known.bound is None else max(bound, self.known.bound))
        cost = None if self.cost == FAR else int(self.cost)
        self._request.on_progress(cost, self.known.bound)
        met = self._request.cuts(self.known.bound) or self._request.is_met(cost, self.known.bound)
        return met or self._request.ended()


def _within(problem: Problem, strategies: Sequence[IntArray], arcs: Sequence[FloatArray], limit: float) -> Chain:
    """The part of a problem whose strategies and arcs cost no more than the limit."""
    pool = Pool()
    part = restrict(problem, [pool(kept) for kept in strategies])
    left = [np.flatnonzero(at_least <= above(limit)) for at_least in arcs]
    networks = (
        replace(
            network,
            tails=pool(network.tails[kept]),
            heads=pool(network.heads[kept]),
            costs=pool(network.costs[kept]),
        )
        for network, kept in zip(part.problem.networks, left, strict=True)
    )
    rerouting = Rerouting(range(len(left)), left, len(left))
    return Chain(replace(part.problem, networks=tuple(networks)), (part.way_back, rerouting))


def _optimum(part: Chain, request: Request) -> Answer:
    """The optimum of a part of a problem, as an answer of all of it."""
    chain = reduce(part.problem, request.deadline_s)
    if not isinstance(chain, Chain):
        return Answer(infeasible=True)
    quiet = replace(request, start=None, on_progress=lambda cost, bound: None, on_answer=lambda answer: None)
    if chain.problem.nodes:
        found = run_lazily(MathOpt("HIGHS"), chain.problem, quiet)
    else:
        found = Answer(Assignment(()).choices, chain.problem.offset)
    return found if found.assignment is None else found.with_assignment(part.lift(chain.lift(found.assignment)))


def _integer(bound: float) -> int:
    """The integer that a bound of the ascent proves."""
    return ceil(bound - max(1e-6, ROUNDING * abs(bound)))
