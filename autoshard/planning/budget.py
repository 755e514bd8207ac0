"""A plan that fits: the program counts what choices and copies hold, the timeline of a plan decides.

The optimum without a budget is taken if it fits. Otherwise the program is solved with what everything holds
(:mod:`autoshard.planning.lives`) under the budget. It never counts more than a plan's timeline, so its bound is one for
all plans that fit, and where it has no answer, no plan fits. Where its relaxation lies between two ways to decide
identical layers, so many of them are decided apart from the others: as many keep as fit, the rest compute again. (One
way for all is up to 1% dearer on Llama-3-8B, and its bound is far off.)

The timeline has a little more: what moves while a collective runs. Where an answer is over the budget by that, the
program is solved again with as much more at the moments where its timeline had more. A plan over its budget is never
returned.

A budget is of what the device counts. What program and timeline count is held against what the budget *allows*, less by
the margin of the machine's allocator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from cost_models import OPTIMIZERS, OptimizerPolicy, optimizer_policy
from solver import (
    Assignment,
    Incumbent,
    Load,
    Mixture,
    Problem,
    Solution,
    Status,
    evaluate,
    fullest,
    is_out_of_reach,
    leaner,
    routed,
)
from solver import Node as SolverNode

from ..capture import recomputable, recomputed
from ..errors import BudgetError, InfeasibleError
from ..lowering import Results
from ..plans import ShardingPlan
from ..plans.schedule import schedule
from ..plans.units import format_bytes, format_enough, format_seconds
from .formulation import Formulation
from .limit import MemoryLimit
from .lives import uncounted, with_charges, with_lives
from .moved import as_choices, moved
from .solving import solve
from .timeline import Timeline, timeline_of, timelines_of

GAP = 4e-3
"""How exactly a program with memory is solved that has more than SMALL strategies; smaller ones are solved exactly."""
SMALL = 1000
NODES = 60
"""How many relaxations, or nodes of branch and cut, that may take: an end that depends on no clock."""
FIRST_NODES = 6
"""How many of them the program takes first in which identical layers are decided alike: what stands alone is decided in
them, and layers that are in two minds are left.
"""
FEWEST_LAYERS = 8
"""How many identical layers there are at least where they may be decided in groups: of four a share says little, and
the demo under 40 MiB took three times as long.
"""
ROUNDS, FEWER_ROUNDS = 8, 3
"""How many answers are looked at, each of a program with what the timeline of the one before had more; the latter in a
search that is not thorough.
"""
BETWEEN = 4
"""Where that finds nothing: how many limits are tried between the least peak and the budget."""
LEANEST_GAP = 1e-2
"""How exactly the least peak is looked for."""
PEAK_FIRST = 100
"""Where the least peak is looked for: how many times the cost of the free plan the bytes of its peak cost."""
LARGEST_SHOWN = 5
LAST_S = 1.0
"""Seconds for each attempt after the time is over."""
SEARCHED = 0.6
"""The part of the time left that a search under a limit may take: what is lean is looked for in the rest."""
NEAR = 0.125
"""By how much of the budget an answer may exceed it for its schedule to be tried: on what holds less, small models take
much longer (the GPT-2 of the tests under 70% of its free peak 11.6 ms instead of 4.3).
"""
ADDED = 0.005
"""Or how much its schedule may add to what it holds without one."""
FAR = 3.0
"""How many times the budget the cheapest plan holds at least where what people do is asked for at once. For a
Llama of 405 billion parameters on 16x8 under 80 GB, where that is six times, the search had no answer after minutes.
"""
FINE = 100
"""The least nanoseconds that a unit of a soft limit costs: rounding its price changes it by a half of a percent."""

Write = Callable[[Formulation, Solution], ShardingPlan]
Relaxed = tuple[str, Formulation]
"""The program without one constraint, and what that constraint is called."""


@dataclass(frozen=True)
class SolverOptions:
    """How the program is solved; ``time_limit_s`` is for all attempts together.

    ``start`` is a known assignment of the program without memory, ``free`` the solver's solution of it, where there is
    one; ``known`` the answer of the program with memory on another schedule, ``bound`` that of a schedule whose prices
    are no higher, ``leanest`` the plan found so far that holds least. Where the cheapest plan holds FAR times the
    budget, ``ask`` says what people do that fits, unless nothing can. ``settle`` is called where the program's own
    answer fits, so that no schedule that holds less has a better one. ``explains`` says whether an error of the budget
    looks for what would free the most, which takes as long as a plan. A search that ``is_thorough`` does not give up
    where what the timeline has more leaves the program no answer. ``report`` is told of better costs, from any thread,
    and of bounds where it ``says_bounds``. ``results`` are what operators make, as far as it is known.

    Raises:
        ValueError: the time limit is no time.
    """

    backend: str = "auto"
    time_limit_s: float | None = None
    start: tuple[int, ...] | None = None
    free: Solution | None = None
    known: Found | None = None
    bound: int | None = None
    leanest: Found | None = None
    ask: Callable[[], Found | None] = lambda: None
    settle: Callable[[], None] = lambda: None
    explains: bool = True
    is_thorough: bool = True
    report: Callable[[str], None] = lambda said: None
    says_bounds: bool = True
    results: Results = field(default_factory=Results)

    def __post_init__(self) -> None:
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise ValueError(f"time_limit_s is {self.time_limit_s}: expected a positive number of seconds, or None")


class NothingFitsError(BudgetError):
    """No plan was found that fits.

    Attributes:
        bound_ns: what one takes at least.
        is_proven: whether none does.
        least_bytes: the smallest budget that was found to work.
        free: the cheapest plan without a budget.
        nearest: the program's answer, where it has one, which does not fit on its schedule.
    """

    def __init__(
        self, message: str, bound_ns: int, is_proven: bool, least_bytes: int, free: Found, nearest: Found | None
    ) -> None:
        super().__init__(message)
        self.bound_ns, self.is_proven, self.least_bytes = bound_ns, is_proven, least_bytes
        self.free, self.nearest = free, nearest


def said_by(report: Callable[[str], None], says_bounds: bool = True) -> Callable[[Incumbent], None]:
    """What tells ``report`` of the solver's costs and bounds: ``solving: 2.34 ms, at least 2.31 ms, gap 1.3%``. Costs
    alone where the bound is none for the plan that was asked for.
    """

    def say(found: Incumbent) -> None:
        if not says_bounds:
            found = replace(found, bound=None)
        known = [] if found.cost is None else [format_seconds(found.cost / 1e9)]
        known += [] if found.bound is None or found.bound <= 0 else [f"at least {format_seconds(found.bound / 1e9)}"]
        if found.cost is not None and found.bound is not None:
            known.append(f"gap {(found.cost - found.bound) / max(1, abs(found.cost)):.2%}")
        report(f"solving: {', '.join(known)}" if known else "solving")

    return say


def plan_within_budget(
    formulation: Formulation,
    limit: MemoryLimit,
    options: SolverOptions,
    write: Write,
    relaxed: Callable[[], Iterable[Relaxed]] = tuple,
    wider: Callable[[], Formulation] | None = None,
) -> ShardingPlan:
    """The cheapest plan found that fits, with its memory.

    Args:
        formulation: the program without memory.
        write: writes a solution as a plan.
        relaxed: the program without each of its constraints, asked for where nothing fits.
        wider: the program that decides what is computed again, asked for where the cheapest plan without does not fit.

    Raises:
        InfeasibleError: the constraints leave no plan, or none was found in the time given.
        NothingFitsError: they do, but none that fits; the message says which budget would, who holds memory at the
            fullest moment, and what would free the most.
    """
    search = _Search(limit, options, write)
    free = search.solved(formulation, formulation.problem, options.free, start=options.start)
    if free is None:
        raise InfeasibleError(f"{search.last.status.value} {search.last.report.explanation}".rstrip())
    budget = limit.allowed_bytes
    if budget is None or free.peak_bytes <= budget:
        return search.stated(free, free.solution.bound)
    wide = formulation if wider is None else wider()
    program = with_lives(wide, limit.policy)
    search.start = free.assignment if wider is None else as_choices(wide, formulation, free.assignment.choices)
    other = options.known
    if other is None and limit.soft_ms_per_gib is None and free.peak_bytes > FAR * budget:
        if not is_out_of_reach(replace(program.problem, usage_limit=budget)):
            other = options.ask()
    known = None if other is None else moved(program, other.formulation, other.assignment)
    weighed = None
    if known is not None:
        search.start = known
        weighed = search.weigh(program, known)
    if limit.soft_ms_per_gib is not None:
        price = limit.soft_ms_per_gib
        soft = _soft(program.problem, budget, price)
        traded = search.solved(program, soft, relative_gap=gap_of(soft), node_limit=NODES)
        least = min(
            (found for found in (free, traded) if found is not None),
            key=lambda found: found.cost_ns + _penalty_ns(found.peak_bytes, budget, price),
        )
        return search.stated(least, free.solution.bound)
    found, bound = search.within(program, budget, free, weighed)
    bound = max(bound or 0, free.solution.bound or 0)
    if found is None:
        said = search.explanation(relaxed()) + _remedy(options, formulation, wider)
        raise NothingFitsError(said, bound, search.is_proven, search.least_bytes, free, search.nearest)
    return search.stated(found, bound)


@dataclass(frozen=True, eq=False)
class Found:
    """An answer of the solver: the plan it stands for, and what that plan really holds in memory, moment by moment.

    ``results`` are what operators make, as far as answers before had them.
    """

    solution: Solution
    plan: ShardingPlan
    formulation: Formulation
    policy: OptimizerPolicy
    results: Results

    @cached_property
    def timeline(self) -> Timeline:
        """What the plan holds, moment by moment."""
        return timeline_of(self.formulation.whole, self.plan, self.policy, self.results, self.formulation.shorts)

    def under(self, policies: Sequence[OptimizerPolicy]) -> list[Timeline]:
        """The same with each of other optimizers."""
        return timelines_of(self.formulation.whole, self.plan, policies, self.results, self.formulation.shorts)

    @cached_property
    def _peaks(self) -> dict[tuple[int, bool], int]:
        """What it holds at most on the schedules that somebody asked for."""
        return {}

    @property
    def peak_bytes(self) -> int:
        """What it holds at most."""
        return self.timeline.peak.size_bytes

    def peak_on(self, bucket_bytes: int, gathers_ahead: bool) -> int:
        """What it would hold at most on another schedule, in bytes."""
        if (bucket_bytes, gathers_ahead) == (self.plan.bucket_bytes, self.plan.gathers_ahead):
            return self.peak_bytes
        key = bucket_bytes, gathers_ahead
        if key not in self._peaks:
            deferred = self.plan.deferred if bucket_bytes and gathers_ahead else ()
            there = replace(self.plan, bucket_bytes=bucket_bytes, gathers_ahead=gathers_ahead, deferred=deferred)
            found = timeline_of(self.formulation.whole, there, self.policy, self.results, self.formulation.shorts)
            self._peaks[key] = found.peak.size_bytes
        return self._peaks[key]

    def is_near(self, budget: int, bucket_bytes: int, gathers_ahead: bool) -> bool:
        """Whether a schedule is not what keeps the plan from fitting: it nearly fits, or would not without one."""
        peak = self.peak_on(bucket_bytes, gathers_ahead)
        return peak <= (1 + NEAR) * budget or peak <= (1 + ADDED) * self.peak_on(0, True)

    @property
    def assignment(self) -> Assignment:
        """Its choices and routes."""
        assert self.solution.choices is not None
        return Assignment(self.solution.choices, self.solution.routes)

    @property
    def cost_ns(self) -> int:
        """Its cost in nanoseconds, without what a price on memory adds."""
        return self.plan.solver.cost_ns


class _Search:
    def __init__(self, limit: MemoryLimit, options: SolverOptions, write: Write) -> None:
        self._limit, self._options, self._write = limit, options, write
        self._started_s = time.monotonic()
        self.last: Solution
        self.start: Assignment | Sequence[int] | None = None  # its fullest moments are the first rows
        self.leanest = options.leanest
        self._fitting: Found | None = None  # the cheapest
        self.is_proven = False
        self.nearest: Found | None = None
        self._fullest: list[int] = []  # the steps of the program that leanest is lean at
        self._byte_ns = 0.0  # what a byte costs there

    def solved(
        self, formulation: Formulation, problem: Problem, known: Solution | None = None, **options: Any
    ) -> Found | None:
        """Solves a problem in the time left, unless its solution is known, and writes the answer as a plan; None where
        there is no answer. ``last`` is the solution as the solver gave it.
        """
        if known is None:
            self._solve(problem, 1.0, **options)
        else:
            self.last = known
        return None if self.last.choices is None else self._found(formulation, self.last)

    def _solve(self, problem: Problem, part: float, is_asked: bool = True, **options: Any) -> None:
        """Solves a problem; one that ``is_asked`` leaves every plan that was asked for, so that its bound is said."""
        self.last = solve(
            problem,
            backend=self._options.backend,
            time_limit_s=self._left_s(part),
            progress=said_by(self._options.report, is_asked and self._options.says_bounds),
            **options,
        )

    def _found(self, formulation: Formulation, solution: Solution) -> Found:
        written = self._write(formulation, solution)
        found = Found(solution, written, formulation, self._limit.policy, self._options.results)
        if self.leanest is None or found.peak_bytes < self.leanest.peak_bytes:
            self.leanest = found
        budget = self._limit.allowed_bytes
        if budget is not None and found.peak_bytes <= budget:
            self._fitting = min(self._fitting or found, found, key=lambda each: each.cost_ns)
        return found

    def weigh(self, formulation: Formulation, known: Assignment) -> Found:
        """Takes a known assignment for an answer, which comes without a bound."""
        return self._found(formulation, replace(self.last, choices=known.choices, routes=known.routes, bound=None))

    def _left_s(self, part: float = 1.0) -> float | None:
        limit_s = self._options.time_limit_s
        if limit_s is None or not limit_s > 0:  # which the solver refuses
            return limit_s
        return max(LAST_S, part * (limit_s - (time.monotonic() - self._started_s)))

    def within(
        self, program: Formulation, budget: int, free: Found, known: Found | None
    ) -> tuple[Found | None, int | None]:
        """The cheapest answer found whose peak is within the budget, None where there is none or none was found in the
        time given; and a bound for all plans within the budget.

        Args:
            known: an answer of another schedule, which is one of this program, too, if it is near the bound.
        """
        charges: dict[int, int] = {}
        if known is not None and self._is_near_bound(known, budget):
            found: Found | None = known
        else:
            program, found = self._alike_or_in_groups(program, budget)
        bound, self.is_proven = self.last.bound, self.last.status is Status.INFEASIBLE
        if found is not None and found is not known and found.peak_bytes <= budget:
            self._options.settle()
        if found is not None and found.peak_bytes > budget and not self._options.is_thorough:
            self.nearest = found
            if self._fitting is None and not found.is_near(budget, found.plan.bucket_bytes, found.plan.gathers_ahead):
                return None, bound
        for left in reversed(range(ROUNDS if self._options.is_thorough else FEWER_ROUNDS)):
            if found is None or found.peak_bytes <= budget or not left:
                break
            self.start = found.assignment
            if found.plan.bucket_bytes:
                program = with_lives(program, self._limit.policy, schedule(found.plan))
            for step, size in uncounted(program, found.assignment, found.timeline).items():
                charges[step] = max(size, charges.get(step, 0))
            found = self._under(program, budget, charges)
        if self._fitting is not None or not self._options.is_thorough:
            return self._fitting, bound
        self._look_for_leanest(program, free)
        leanest = self.leanest
        if leanest is None or leanest.peak_bytes > budget:
            return None, bound
        counted = evaluate(program.problem, *leanest.assignment).peak_usage
        return self._between(program, counted, budget, budget, leanest), bound

    def _is_near_bound(self, known: Found, budget: int) -> bool:
        """Whether a solver could find nothing better than an answer, as far as it would look."""
        problem, bound = replace(known.formulation.problem, usage_limit=budget), self._options.bound
        judged = evaluate(problem, *known.assignment)
        return judged.feasible and bound is not None and judged.cost - bound <= gap_of(problem) * judged.cost

    def _between(self, program: Formulation, low: int, high: int, budget: int, best: Found) -> Found:
        """The cheapest answer found under limits between one whose answer fits and one whose answer does not."""
        for _ in range(BETWEEN):
            limit = (low + high) // 2
            found = self._under(program, limit)
            if found is None or found.peak_bytes > budget:
                high = limit
                continue
            low = limit
            best = min((best, found), key=lambda each: (each.cost_ns, each.peak_bytes))
        return best

    def _alike_or_in_groups(self, program: Formulation, budget: int) -> tuple[Formulation, Found | None]:
        """The answer of a program in which identical layers are decided alike or, where its first relaxation mixes two
        ways to do that and the gap is large, or what it mixes much cheaper, of the program in which they are two
        groups; and that program.
        """
        if max(map(len, program.problem.ties), default=0) < FEWEST_LAYERS:
            return program, self._under(program, budget)
        self._solve_under(program.problem, budget, nodes=FIRST_NODES)
        if self.last.status is Status.INFEASIBLE:
            return program, None
        share, cost = _leaner_share(program.problem, self.last.mixtures), self.last.cost
        good = 1 + gap_of(program.problem)
        is_dear = share is not None and (cost or 0) > good * _mixed_cost(program.problem, self.last.mixtures)
        if self.last.gap <= gap_of(program.problem) and not is_dear:
            return program, self._found(program, self.last)
        if self.last.choices is not None:
            self.start = Assignment(self.last.choices, self.last.routes)
        if share is not None:
            program = program.in_groups(share, FEWEST_LAYERS)
        return program, self._under(program, budget)

    def _under(self, program: Formulation, limit: int, charges: Mapping[int, int] = {}) -> Found | None:
        self._solve_under(
            with_charges(program, charges), limit, NODES, not charges and limit == self._limit.allowed_bytes
        )
        return None if self.last.choices is None else self._found(program, self.last)

    def _solve_under(self, problem: Problem, limit: int, nodes: int, is_asked: bool = True) -> None:
        options: dict[str, Any] = {"relative_gap": gap_of(problem), "node_limit": nodes, "explains": False}
        self._solve(replace(problem, usage_limit=limit), SEARCHED, is_asked, start=self.start, **options)

    def _look_for_leanest(self, program: Formulation, free: Found) -> None:
        """Notes answers of ever lower peaks."""
        start = self.start if isinstance(self.start, Assignment) else routed(program.problem, self.start or ())
        assert start is not None
        self._fullest = [fullest(program.problem, start)[0]]
        self._byte_ns = PEAK_FIRST * free.cost_ns / max(1, free.peak_bytes)
        for _ in self._leaner(program, self._fullest):
            pass

    def _leaner(self, program: Formulation, steps: list[int]) -> Iterator[Found]:
        """Answers of ever lower peaks, from the one on that is lean at some steps; they come without bounds."""
        options: dict[str, Any] = {"relative_gap": LEANEST_GAP, "node_limit": NODES, "explains": False}
        solutions: list[Solution] = []

        def choose(priced: Problem) -> tuple[int, ...] | None:
            solution = solve(priced, backend=self._options.backend, time_limit_s=self._left_s(), **options)
            solutions.append(solution)
            return solution.choices

        for answer in leaner(program.problem, steps, self._byte_ns, choose):
            solution = replace(solutions[-1], choices=answer.choices, routes=answer.routes, bound=None)
            yield self._found(program, solution)

    def stated(self, found: Found, bound: int | None) -> ShardingPlan:
        """The plan with its memory, and a bound in nanoseconds."""
        cost = found.cost_ns
        solver = found.plan.solver.having(cost, min(cost, bound or 0))
        return replace(found.plan, solver=solver, memory=self._limit.outcome(found.timeline))

    @property
    def least_bytes(self) -> int:
        """The smallest budget found to work."""
        assert self.leanest is not None
        return self._limit.outcome(self.leanest.timeline).reserved_bytes

    def explanation(self, relaxed: Iterable[Relaxed]) -> str:
        """The text of the error where no plan fits: the smallest budget found to work, who holds the memory there, and
        what would free the most.
        """
        found, budget = self.leanest, self._limit.budget_bytes
        assert found is not None and budget is not None
        memory = self._limit.outcome(found.timeline)
        least = memory.reserved_bytes
        needed = (
            f"{self._said()} {format_bytes(budget)} per rank ({budget} bytes): the smallest budget found to work is "
            f"{format_enough(least)} ({least} bytes{f': {memory.peak_words}' * bool(memory.allocator_margin)})"
        )
        if not self._options.explains:
            return needed
        largest = ", ".join(
            f"{tenant.name} ({tenant.kind}{f', {tenant.count} tensors' if tenant.count > 1 else ''}) "
            f"{format_bytes(tenant.size_bytes)}"
            for tenant in memory.tenants[:LARGEST_SHOWN]
        )
        return (
            f"{needed}; its fullest moment is in the {memory.peak.phase} at {memory.peak.operator}, where the largest "
            f"are {largest}; {self._frees_most(found, relaxed)}"
        )

    def _said(self) -> str:
        """``no plan fits``, or what is known where that is not proven."""
        if self.is_proven:
            return "no plan fits"
        left_s = self._left_s()
        in_time = " in the time given" if left_s is not None and left_s <= LAST_S else ""
        return f"no plan was found{in_time} that fits"

    def _frees_most(self, found: Found, relaxed: Iterable[Relaxed]) -> str:
        """A clause on what would help most: another optimizer policy, or a plan without one of the constraints."""
        others = [name for name in OPTIMIZERS if name not in ("none", self._limit.optimizer)]
        policies = [optimizer_policy(name) for name in others]
        freed = [
            (found.peak_bytes - timeline.peak.size_bytes, f"the optimizer policy {name}")
            for name, timeline in zip(others, found.under(policies))
        ]
        for name, formulation in relaxed:
            other = self._leanest_of(formulation)
            if other is not None:
                freed.append((found.peak_bytes - other.peak_bytes, f"a plan without the constraint {name!r}"))
        most, what = max(freed, default=(0, ""))
        if most <= 0:
            return (
                "no other optimizer policy and no constraint left out frees anything: use more ranks or a smaller batch"
            )
        return f"{what} would free the most, {format_bytes(most)}"

    def _leanest_of(self, formulation: Formulation) -> Found | None:
        """An answer of another program of the graph that is lean where the leanest one is."""
        program = with_lives(formulation, self._limit.policy)
        return next(self._leaner(program, list(self._fullest)), None)


def _remedy(options: SolverOptions, formulation: Formulation, wider: object) -> str:
    """A clause on letting the program decide what is computed again, where it did not and there is something left."""
    graph = formulation.whole
    most = recomputed(graph, recomputable(graph) | set(graph.again)).again
    if not options.explains or wider is not None or set(most) == set(graph.again):
        return ""
    return (
        "; a plan that computes more of the forward again may fit: autoshard plan --checkpointing free "
        "(checkpointing='free') decides what"
    )


def _leaner_share(problem: Problem, mixtures: Iterable[Mixture]) -> float | None:
    """Which part of what identical layers are a relaxation decides in the leaner of two ways that it mixes, those that
    are furthest apart; None where it mixes none, or where they do the same in all layers.
    """
    shares: dict[int, float] = {}
    for each in mixtures:
        if any(each.main.choices[tie[0]] != each.other.choices[tie[0]] for tie in problem.ties):
            more = evaluate(problem, *each.main).peak_usage - evaluate(problem, *each.other).peak_usage
            shares[abs(more)] = each.share if more > 0 else 1 - each.share
    return shares[max(shares)] if shares else None


def _mixed_cost(problem: Problem, mixtures: Sequence[Mixture]) -> float:
    """What a relaxation costs that mixes ways to decide identical layers, at least two: about that of a plan that
    decides them in groups of its shares.
    """
    main = evaluate(problem, *mixtures[0].main).cost  # that of all of them
    return main + sum(each.share * (evaluate(problem, *each.other).cost - main) for each in mixtures)


def gap_of(problem: Problem) -> float:
    """How exactly a program with memory is solved."""
    return 0.0 if sum(len(node.costs) for node in problem.nodes) <= SMALL else GAP


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
    networks = tuple(
        network if network.sizes is None else replace(network, sizes=network.sizes // unit)
        for network in problem.networks
    )
    limit, price = budget // unit, round(ns_per_byte * unit)
    return replace(problem, nodes=nodes, networks=networks, usage_limit=limit, usage_price=price)
