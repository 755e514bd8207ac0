"""A plan under a budget on the first of several schedules that allows a good one.

Collectives that travel together and ahead hold memory. So where a search finds nothing that fits on the planner's
schedule, or nothing good, it goes on with schedules that hold less: buckets that are not gathered ahead, smaller ones,
at last each tensor alone; unless the program's own answer fits at once, which no other schedule makes cheaper: a gap is
the solver's then. An answer that does not fit on one schedule is where the next search starts. Before the last
search baselines are looked at (:mod:`autoshard.planning.experts`), and before the first one where it has far to go; at
last, too, where a time limit ended it far from the bound, with or without a budget.
Where each tensor travels alone from the start, the last search is on that schedule, too.

The bound is that of the first schedule, whose prices are the lowest: what travels in smaller buckets takes no less. Of
the others none is said while they are solved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ..capture import Ref
from ..plans import ShardingPlan
from ..plans.schedule import LEAN_BUCKETS_BYTES
from .budget import LAST_S, Found, NothingFitsError, gap_of
from .experts import Planning, experts
from .formulation import Formulation

DOUBTFUL = 0.05
"""The gap above which baselines are looked at."""
FOR_EXPERTS = 0.25
"""How much of a time limit that may take, beside what is left of it, once there is a plan; and each one of them."""


@dataclass(frozen=True, eq=False)
class Hints:
    """What is known before a search: whether it is the last one, and nothing fits so far; the answer of a search before
    that is nearest to the budget; the bound; the plan that holds least; what finds a baseline that fits; and what is
    called where the search is not worth going on with on schedules that hold less.
    """

    is_last: bool = True
    known: Found | None = None
    bound_ns: int | None = None
    leanest: Found | None = None
    ask: Callable[[], Found | None] = lambda: None
    settle: Callable[[], None] = lambda: None


_P = TypeVar("_P", bound=Planning)
Search = Callable[[_P, Formulation, Hints], ShardingPlan]
"""What a planner finds within the budget for a program of its own.

Raises:
    NothingFitsError: nothing.
"""


def on_any_schedule(planner: _P, formulation: Formulation, search: Search[_P], asks_experts: bool) -> ShardingPlan:
    """The plan on the planner's schedule or, where none is found that fits or its gap is large, the cheapest of it and
    those on schedules that hold less.

    Args:
        formulation: the planner's program without memory.

    Raises:
        What the search does.
    """
    return _Ladder(planner, formulation, search, asks_experts).plan()


class _Ladder(Generic[_P]):
    def __init__(self, planner: _P, formulation: Formulation, search: Search[_P], asks_experts: bool) -> None:
        self._planner, self._formulation, self._search = planner, formulation, search
        self._asks_experts = asks_experts
        self._started_s = time.monotonic()
        self._best: ShardingPlan | None = None
        self._schedules = [planner, *_leaner(planner, _travelling_bytes(formulation))]
        limit_s = planner.time_limit_s
        shortly = limit_s and max(LAST_S, FOR_EXPERTS * limit_s)
        quick = [each.having(time_limit_s=shortly) for each in self._schedules]
        self._experts = experts(quick, formulation.constraints, self._known_ns)
        self._bound_ns: int | None = None
        self._known: Found | None = None
        self._leanest: Found | None = None
        self._cannot = False
        self._is_settled = False

    def plan(self) -> ShardingPlan:
        left = list(self._schedules)
        if len(left) == 1 and self._planner.limit.allowed_bytes is not None:
            left.append(self._planner)  # thoroughly, where neither a first look nor a baseline fits
        while left:
            planner, *left = left
            if not left and self._bound_ns is not None:
                self._ask_experts()
                if self._best is not None and (planner is self._planner or self._left_s() == 0):
                    break
            try:
                found = self._searched(planner, is_last=not left)
            except NothingFitsError as error:
                if self._best is None and not left:
                    raise
                self._note_bound(error.bound_ns)
                self._cannot |= error.is_proven
                self._note_lean(error.free)  # which every budget that it fits has for an answer
                # without an answer there is none on other schedules either: the program counts none at first
                near = self._known = error.nearest
                left = [other for other in left[:-1] if near and _is_near(other, near)] + left[-1:]
                continue
            self._note_bound(found.solver.bound_ns)
            self._note(found)
            if self._is_settled or self._is_good(found) or self._left_s() == 0:
                self._ask_experts()
                break
        assert self._best is not None
        return self._stated(self._best)

    def _searched(self, planner: _P, is_last: bool) -> ShardingPlan:
        hints = Hints(
            is_last and self._best is None,
            self._known,
            self._bound_ns,
            self._leanest,
            self._first_expert,
            self._settle,
        )
        is_ours, left_s = planner is self._planner, self._left_s()
        if left_s is not None and self._bound_ns is not None:
            planner = planner.having(time_limit_s=max(LAST_S, left_s))
        program = self._formulation if is_ours else planner.program(self._formulation.constraints)
        return self._search(planner, program, hints)

    def _settle(self) -> None:
        """Notes that the program's own answer fits on the schedule: no other makes it cheaper."""
        self._is_settled = True

    def _first_expert(self) -> Found | None:
        """The first baseline that fits, if one does and they are asked: of those that the program can start from, as it
        offers all of their cuts.
        """
        if self._asks_experts:
            for found in self._experts:
                if self._noted(found) and set(found.formulation.asked) <= set(self._formulation.asked):
                    return found
        return None

    def _ask_experts(self) -> None:
        """Looks at baselines where no plan is known, or none near the bound, unless there can be none."""
        is_good = self._best is not None and self._stated(self._best).solver.gap <= DOUBTFUL
        if not self._asks_experts or self._cannot or is_good:
            return
        until_s = None
        if self._planner.time_limit_s is not None:
            until_s = time.monotonic() + (self._left_s() or 0.0) + FOR_EXPERTS * self._planner.time_limit_s
        for found in self._experts:
            self._noted(found)
            if self._best is not None and until_s is not None and time.monotonic() > until_s:
                break

    def _noted(self, found: Found) -> bool:
        """Notes a baseline's plan; whether it fits."""
        limit, budget = self._planner.limit, self._planner.limit.allowed_bytes
        self._note_lean(found)
        if budget is not None and found.peak_bytes > budget:
            return False
        self._note(replace(found.plan, memory=limit.outcome(found.timeline)))
        return True

    def _known_ns(self) -> float:
        """The cost of the best plan that is known."""
        return math.inf if self._best is None else self._best.solver.cost_ns

    def _note(self, found: ShardingPlan) -> None:
        self._best = min(self._best or found, found, key=lambda plan: plan.solver.cost_ns)

    def _note_lean(self, found: Found) -> None:
        self._leanest = min(self._leanest or found, found, key=lambda each: each.peak_bytes)

    def _note_bound(self, bound_ns: int) -> None:
        self._bound_ns = bound_ns if self._bound_ns is None else self._bound_ns

    def _stated(self, plan: ShardingPlan) -> ShardingPlan:
        cost = plan.solver.cost_ns
        return replace(plan, solver=plan.solver.having(cost, min(self._bound_ns or 0, cost)))

    def _is_good(self, plan: ShardingPlan) -> bool:
        """Whether a plan on a schedule that holds less is not worth a look."""
        # what of a schedule does not hide is in the gap, too, and on one that holds less it is no less
        good = DOUBTFUL if self._planner.objective == "overlapped-step-time" else 2 * gap_of(self._formulation.problem)
        gap = min(plan.solver.gap, self._stated(plan).solver.gap)  # to the bound of its own schedule, or of all
        return self._planner.limit.allowed_bytes is None or gap <= good

    def _left_s(self) -> float | None:
        """Seconds of the time limit that are left, never negative; None where there is no limit."""
        limit_s = self._planner.time_limit_s
        return None if limit_s is None else max(0.0, limit_s - (time.monotonic() - self._started_s))


def _travelling_bytes(formulation: Formulation) -> int:
    """What travels in buckets at most, whatever its dtype: parameters, or gradients of them."""
    parameters = (formulation.whole.meta(Ref(i)) for i, _ in formulation.whole.of_kind("parameter"))
    return sum(math.prod(meta.shape) * _WIDEST for meta in parameters)


_WIDEST = 16
"""Bytes of a number at most: complex128."""


def _leaner(planner: _P, travelling_bytes: int) -> Iterator[_P]:
    """Planners of plans that hold less on the way: not ahead, in ever smaller buckets; at last each alone. Of smaller
    sizes that hold all that travels the smallest.
    """
    if planner.bucket_bytes and planner.limit.allowed_bytes is not None:
        lean = planner.having(gathers_ahead=False, says_bounds=False)
        if planner.gathers_ahead:
            yield lean
        smaller = [size for size in LEAN_BUCKETS_BYTES if size < planner.bucket_bytes]
        for size in smaller:
            if size == smaller[-1] or travelling_bytes > smaller[-1]:
                yield lean.having(bucket_bytes=size)
        yield lean.having(bucket_bytes=0, gathers_ahead=True)


def _is_near(planner: Planning, found: Found) -> bool:
    """Whether a plan of another schedule would nearly fit on the planner's."""
    budget = planner.limit.allowed_bytes
    return budget is None or found.is_near(budget, planner.bucket_bytes, planner.gathers_ahead)
