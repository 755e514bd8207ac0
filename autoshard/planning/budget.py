"""A plan that fits: the program proposes, the timeline decides.

The program of :mod:`autoshard.planning.liveness` estimates; the timeline of a plan is exact. So the optimum without a
budget is taken if it fits. Otherwise memory gets a price: with ``p`` nanoseconds for every byte at the fullest moments
the program is as easy to solve as without a budget, and its answer holds less the higher ``p`` is. Of a fixed ladder of
prices the lowest whose answer fits is taken. From there the program is solved under the budget for a limited time,
which improves the answer. A plan over its budget is never returned.

Source of the price: the Lagrangian relaxation of the memory rows, Held, Wolfe and Crowder 1974, as in
``solver/backends/decomposition``; here each problem is solved by branch and cut, so its answer is one that can be used.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cost_models import OPTIMIZERS, OptimizerPolicy, Profile, optimizer_policy
from solver import INFEASIBLE, Load, Problem, Solution, evaluate, solve
from solver import Node as SolverNode

from ..errors import BudgetError, InfeasibleError
from ..plans import MemoryOutcome, ShardingPlan, SolverOutcome
from ..plans.units import format_bytes, parse_bytes
from .formulation import Formulation
from .liveness import with_memory_loads
from .timeline import Timeline, outcome, timeline_of

LADDER = tuple(2.0**k for k in range(-6, 10))
"""Prices of the whole free peak that are tried, as multiples of the free plan's cost."""
FULLEST = 3
"""Moments that share a price at most."""
PRICED_GAP = 2e-3
"""How exactly a program with prices is solved."""
PRICED_S = 30.0
POLISH_S = 30.0
"""The longest solve with a price, and the last one under the budget where no time limit is given."""
LARGEST_SHOWN = 5
FINE = 100
"""The least nanoseconds that a unit of a soft limit costs: rounding its price changes it by a half of a percent."""

Write = Callable[[Formulation, Solution], ShardingPlan]
Relaxed = tuple[str, Formulation]
"""The program without one constraint, and what that constraint is called."""


@dataclass(frozen=True)
class MemoryLimit:
    """What a rank may hold, and whose state counts.

    Attributes:
        optimizer: the name of a policy (:mod:`cost_models.optimizers`).
        budget_bytes: None for no limit.
        soft_ms_per_gib: makes the limit soft: one GiB above it costs as much as this many milliseconds of step time.
    """

    optimizer: str = "adamw"
    budget_bytes: int | None = None
    soft_ms_per_gib: float | None = None

    @property
    def policy(self) -> OptimizerPolicy:
        """The policy of the optimizer."""
        return optimizer_policy(self.optimizer)


def memory_limit(
    optimizer: str, memory: str | int | None, soft_ms_per_gib: float | None, profile: Profile
) -> MemoryLimit:
    """The limit that a user means.

    Raises:
        BudgetError: the budget is no size, not above zero, or missing where it is to be soft; the price is no number
            from 0 up; or the optimizer policy is unknown.
    """
    try:
        optimizer_policy(optimizer)
        budget = int(profile.memory_bytes) if memory == "profile" else memory
        budget = parse_bytes(budget) if isinstance(budget, str) else budget
    except ValueError as error:
        raise BudgetError(str(error)) from None
    if budget is not None and budget <= 0:
        raise BudgetError(f"the memory budget is {memory}; give a size above zero, for example 80GiB")
    if soft_ms_per_gib is not None:
        if budget is None:
            raise BudgetError("a soft memory limit needs a budget; give one, for example 80GiB")
        if not (0 <= soft_ms_per_gib < math.inf):
            raise BudgetError(f"{soft_ms_per_gib} is no price; give milliseconds per GiB above the budget, from 0 up")
    return MemoryLimit(optimizer, budget, soft_ms_per_gib)


@dataclass(frozen=True)
class SolverOptions:
    """How the program is solved; ``time_limit_s`` is for all attempts together.

    ``start`` is a known assignment of the program without memory. ``explains`` says whether an error of the budget
    looks for what would free the most, which takes as long as a plan.

    Raises:
        ValueError: the time limit is no time.
    """

    backend: str = "auto"
    time_limit_s: float | None = None
    start: tuple[int, ...] | None = None
    explains: bool = True

    def __post_init__(self) -> None:
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise ValueError(f"time_limit_s is {self.time_limit_s}: expected a positive number of seconds, or None")


def plan_within_budget(
    formulation: Formulation,
    limit: MemoryLimit,
    options: SolverOptions,
    write: Write,
    relaxed: Callable[[], Iterable[Relaxed]] = tuple,
) -> ShardingPlan:
    """The cheapest plan found that fits, with its memory.

    Args:
        formulation: the program without memory.
        write: writes a solution as a plan.
        relaxed: the program without each of its constraints, asked for where nothing fits.

    Raises:
        InfeasibleError: the constraints leave no plan, or none was found in the time given.
        BudgetError: they do, but none that fits; the message says which budget would, who holds memory at the fullest
            moment, and what would free the most.
    """
    search = _Search(limit, options, write)
    free = search.solved(formulation, formulation.problem, start=options.start)
    if free is None:
        raise InfeasibleError(f"{search.last.status.value} {search.last.report.explanation}".rstrip())
    budget = limit.budget_bytes
    if budget is None or free.peak_bytes <= budget:
        return search.stated(free, free.solution)
    programs = tuple(
        with_memory_loads(formulation, limit.policy, budget, keep_activations=keep) for keep in (True, False)
    )
    if limit.soft_ms_per_gib is not None:
        price = limit.soft_ms_per_gib
        traded = (search.solved(program, _soft(program.problem, budget, price)) for program in programs)
        least = min(
            (found for found in (free, *traded) if found is not None),
            key=lambda found: found.cost_ns + _penalty_ns(found.peak_bytes, budget, price),
        )
        return search.stated(least, free.solution)
    found = search.within(programs, budget, free)
    if found is None:
        raise BudgetError(search.explanation(budget, relaxed()))
    return search.stated(found, free.solution)


@dataclass(frozen=True, eq=False)
class _Found:
    """An answer of the solver: the plan it stands for, and what that plan really holds in memory, moment by moment."""

    solution: Solution
    plan: ShardingPlan
    timeline: Timeline
    formulation: Formulation

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak.size_bytes

    @property
    def cost_ns(self) -> int:
        """Its cost in nanoseconds, without what a price on memory adds."""
        return self.plan.solver.cost_ns


class _Search:
    def __init__(self, limit: MemoryLimit, options: SolverOptions, write: Write) -> None:
        self._limit, self._options, self._write = limit, options, write
        self._started_s = time.monotonic()
        self.last: Solution
        self.leanest: _Found | None = None

    def solved(self, formulation: Formulation, problem: Problem, **options: Any) -> _Found | None:
        """Solves a problem and writes the answer as a plan; None where there is no answer. ``last`` is the solution as
        the solver gave it.
        """
        limits_s = [limit for limit in (options.pop("time_limit_s", None), self._left_s()) if limit is not None]
        options["time_limit_s"] = min(limits_s, default=None)
        self.last = solve(problem, backend=self._options.backend, **options)
        return None if self.last.choices is None else self._found(formulation, self.last)

    def _left_s(self) -> float | None:
        limit_s = self._options.time_limit_s
        if limit_s is None or not limit_s > 0:  # which the solver refuses
            return limit_s
        return max(1.0, limit_s - (time.monotonic() - self._started_s))

    def _found(self, formulation: Formulation, solution: Solution) -> _Found:
        plan = self._write(formulation, solution)
        return _Found(solution, plan, timeline_of(formulation.graph, plan, self._limit.policy), formulation)

    def within(self, programs: Iterable[Formulation], budget: int, free: _Found) -> _Found | None:
        """The cheapest answer found whose peak is within the budget, or None where none was found in the time given."""
        best: _Found | None = None
        for program in programs:
            found = self._on_ladder(_Ladder(self, program, free), budget)
            if found is not None and (best is None or found.cost_ns < best.cost_ns):
                best = found
        return None if best is None else self._polished(best.formulation, budget, best)

    def _on_ladder(self, ladder: _Ladder, budget: int) -> _Found | None:
        leanest = ladder.leanest()
        if self.leanest is None or leanest.peak_bytes < self.leanest.peak_bytes:
            self.leanest = leanest
        low, high = -1, len(LADDER) - 1 if leanest.peak_bytes <= budget else 0
        while high - low > 1:  # low does not fit, high does
            middle = (low + high) // 2
            low, high = (low, middle) if ladder.answer(middle).peak_bytes <= budget else (middle, high)
        fitting = [found for found in ladder.answers() if found.peak_bytes <= budget]
        return min(fitting, key=lambda found: (found.cost_ns, found.peak_bytes), default=None)

    def _polished(self, program: Formulation, budget: int, best: _Found) -> _Found:
        """The best answer after further solves under the budget. The program over- or underestimates memory, so its
        limit is what it counts for the best answer so far plus what that answer leaves of the budget; repeated while it
        helps.
        """
        until_s = time.monotonic() + POLISH_S
        limit = -1
        while (wider := budget - best.peak_bytes + self._estimated(program, best)) > limit:
            limit = wider
            left_s = None if self._options.time_limit_s else max(1.0, until_s - time.monotonic())
            problem = replace(program.problem, usage_limit=limit)
            better = self.solved(program, problem, start=best.solution.choices, time_limit_s=left_s)
            if better is None or better.peak_bytes > budget or better.cost_ns >= best.cost_ns:
                break
            best = better
        return best

    @staticmethod
    def _estimated(program: Formulation, found: _Found) -> int:
        """The most bytes that an answer holds at a time, as the program estimates it."""
        assert found.solution.choices is not None
        return evaluate(program.problem, found.solution.choices).peak_usage

    def stated(self, found: _Found, free: Solution) -> ShardingPlan:
        """The plan with its memory. Its bound is that of the plans without a budget, which holds for all plans: the
        program's own, under the budget, holds only as far as it estimates memory rightly.
        """
        cost, bound = found.cost_ns, min(found.cost_ns, free.bound or 0)
        solver = SolverOutcome.of(cost, bound, found.plan.solver.identical_layers)
        return replace(found.plan, solver=solver, memory=self._memory(found))

    def _memory(self, found: _Found) -> MemoryOutcome:
        limit = self._limit
        return outcome(found.timeline, limit.optimizer, limit.budget_bytes, limit.soft_ms_per_gib)

    def explanation(self, budget: int, relaxed: Iterable[Relaxed]) -> str:
        """The text of the error where no plan fits: the smallest budget found to work, who holds the memory there, and
        what would free the most.
        """
        asked = f"no plan fits {format_bytes(budget)} per rank ({budget} bytes)"
        found = self.leanest
        assert found is not None
        needed = (
            f"{asked}: the smallest budget found to work is {format_bytes(found.peak_bytes)} ({found.peak_bytes} bytes)"
        )
        if not self._options.explains:
            return needed
        memory = self._memory(found)
        largest = ", ".join(
            f"{tenant.name} ({tenant.kind}{f', {tenant.count} tensors' if tenant.count > 1 else ''}) "
            f"{format_bytes(tenant.size_bytes)}"
            for tenant in memory.tenants[:LARGEST_SHOWN]
        )
        return (
            f"{needed}; its fullest moment is in the {memory.peak.phase} at {memory.peak.operator}, where the largest "
            f"are {largest}; {self._frees_most(found, relaxed)}"
        )

    def _frees_most(self, found: _Found, relaxed: Iterable[Relaxed]) -> str:
        """A clause on what would help most: another optimizer policy, or a plan without one of the constraints."""
        freed: list[tuple[int, str]] = []
        for name in OPTIMIZERS:
            if name not in ("none", self._limit.optimizer):
                peak = timeline_of(found.formulation.graph, found.plan, optimizer_policy(name)).peak
                freed.append((found.peak_bytes - peak.size_bytes, f"the optimizer policy {name}"))
        for name, formulation in relaxed:
            program = with_memory_loads(formulation, self._limit.policy, found.peak_bytes, keep_activations=False)
            other = self.solved(formulation, formulation.problem)
            if other is not None:
                other = _Ladder(self, program, other).leanest()
                freed.append((found.peak_bytes - other.peak_bytes, f"a plan without the constraint {name!r}"))
        most, what = max(freed, default=(0, ""))
        if most <= 0:
            return (
                "no other optimizer policy and no constraint left out frees anything: use more ranks or a smaller batch"
            )
        return f"{what} would free the most, {format_bytes(most)}"


class _Ladder:
    """Answers of one program with memory at each price of LADDER. None depends on the budget or on another answer."""

    def __init__(self, search: _Search, program: Formulation, free: _Found) -> None:
        self._search, self._program, self._free = search, program, free
        self._known: dict[int, _Found] = {}
        self._price = free.cost_ns / max(1, free.peak_bytes)
        self._steps = [self._peak_step(free)]

    def answers(self) -> list[_Found]:
        """The answers found so far, from the lowest price of memory to the highest."""
        return [found for _, found in sorted(self._known.items())]

    def leanest(self) -> _Found:
        """The answer of the least peak at the highest price, and with it the moments that carry prices: the fullest one
        of the free answer, then that of each answer that the price of the moments so far gives.
        """
        top = len(LADDER) - 1
        if top not in self._known:
            candidates = []
            while len(self._steps) <= FULLEST:
                found = self._solved(top)
                candidates.append(found)
                step = self._peak_step(found)
                if step in self._steps or len(self._steps) == FULLEST:
                    break
                self._steps.append(step)
            self._known[top] = min(candidates, key=lambda found: (found.peak_bytes, found.cost_ns))
        return self._known[top]

    def answer(self, rung: int) -> _Found:
        """The answer at the price number ``rung`` of LADDER; solved once."""
        if rung not in self._known:
            self._known[rung] = self._solved(rung)
        return self._known[rung]

    def _solved(self, rung: int) -> _Found:
        price = LADDER[rung] * self._price / len(self._steps)
        problem = _priced(self._program.problem, dict.fromkeys(self._steps, price))
        found = self._search.solved(self._program, problem, relative_gap=PRICED_GAP, time_limit_s=PRICED_S)
        return self._free if found is None else found  # none in the time given

    def _peak_step(self, found: _Found) -> int:
        """The time step at which an answer holds the most bytes, as the program estimates it."""
        assert found.solution.choices is not None
        choices = found.solution.choices
        if len(choices) < len(self._program.problem.nodes):  # the free answer knows nothing of copies
            nodes = self._program.problem.nodes[: len(choices)]
            return evaluate(Problem(nodes, ()), choices).peak_step or 0
        return evaluate(self._program.problem, choices).peak_step or 0


def _priced(problem: Problem, prices: dict[int, float]) -> Problem:
    """The problem without a limit, in which every byte that lives at a step costs nanoseconds."""

    def cost(node: SolverNode) -> np.ndarray:
        total = np.zeros(len(node.costs))
        for (first, last), used in node.loads:
            total += sum(price for step, price in prices.items() if first <= step < last) * used
        return np.where(node.costs >= INFEASIBLE, INFEASIBLE, node.costs + np.rint(total).astype(np.int64))

    nodes = tuple(SolverNode(node.name, cost(node)) if node.loads else node for node in problem.nodes)
    return replace(problem, nodes=nodes, usage_limit=None, usage_price=None)


def _penalty_ns(peak_bytes: int, budget: int, ms_per_gib: float) -> float:
    return max(0, peak_bytes - budget) * ms_per_gib * 1e6 / 2**30


def _soft(problem: Problem, budget: int, ms_per_gib: float) -> Problem:
    """The problem with a price on the bytes above the budget, in units large enough for an integer price."""
    ns_per_byte = ms_per_gib * 1e6 / 2**30
    unit = 1 if ns_per_byte == 0 else 2 ** max(0, math.ceil(math.log2(FINE / ns_per_byte)))
    nodes = tuple(
        SolverNode(
            node.name, node.costs, further_loads=tuple(Load(interval, used // unit) for interval, used in node.loads)
        )
        for node in problem.nodes
    )
    return replace(problem, nodes=nodes, usage_limit=budget // unit, usage_price=round(ns_per_byte * unit))
