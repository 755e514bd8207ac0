"""The optimum against every baseline, by one pipeline and one prediction.

The optimum starts from the best baseline: every plan of a baseline is an assignment of the unconstrained program, where
it costs the same or less, so the optimum is never worse, even where the solver's time ends early.

People compute again only what they must. So a baseline is planned without recomputation first, and with it where its
cheapest plan without a budget does not fit the one given.

A baseline's cheapest plan without a budget is a bound of those within one. So baselines are searched from the least
such bound on, and one whose bound is no less than what another takes within the budget is not searched: it cannot win.
Where the best baseline alone is asked for, no other is planned at all once its bound is no less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

import cost_models
from solver import Solution

from ..constraints import AxisScheme, gather_constraints
from ..constraints.baselines import Baseline, baselines
from ..errors import BudgetError, ConstraintError, InfeasibleError
from ..mesh import Mesh
from ..plans import Contender, Contest, ShardingPlan
from ..plans.expert_attribution import distance
from ..plans.schedule import BUCKET_BYTES, bucket_size
from ..plans.units import format_bytes, format_seconds
from ..precision import Precision
from .formulation import Formulation, Objective
from .limit import memory_limit
from .planner import Checkpointing, Planner, profile_of
from .timeline import timeline_of

OPTIMUM = "optimum"


def compare(
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    mesh: Mesh | str | Mapping[str, int],
    hardware: str | cost_models.Profile = "dgx-h100",
    constraints: Sequence[str] = (),
    objective: Objective = "step-time",
    backend: str = "auto",
    time_limit_s: float | None = None,
    optimizer: str = "adamw",
    memory: str | int | None = None,
    checkpointing: Checkpointing = "free",
    micro_batches: int = 1,
    bucket: str | int = BUCKET_BYTES,
    param_dtype: object = None,
    reduce_dtype: object = None,
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Contest:
    """Plans a model freely and under every baseline of the mesh.

    Args:
        model, args, kwargs, mesh, hardware, objective, backend, optimizer, memory, micro_batches, bucket, param_dtype,
            reduce_dtype, name, progress: as for :func:`autoshard.plan`.
        constraints: further ones, for the optimum and the baselines alike.
        time_limit_s: for the solver, for each contender.
        checkpointing: as for :func:`autoshard.plan`, for the optimum; for baselines ``none`` means that marks in the
            model do not count. But for ``free`` a baseline may compute again what the optimum's program cannot; where
            it costs less, the optimum computes again what that baseline does, and says so (``Contender.reason``).

    Raises:
        InfeasibleError, BudgetError: there is no plan at all.
        What :func:`autoshard.plan` raises for its arguments.
    """
    report = progress or (lambda stage: None)
    profile = profile_of(hardware)
    limit = memory_limit(optimizer, memory, None, profile)
    bucket_bytes = bucket_size(bucket)
    options = {
        "objective": objective,
        "backend": backend,
        "time_limit_s": time_limit_s,
        "limit": limit,
        "bucket_bytes": bucket_bytes,
    }
    planner = Planner.of_model(
        model,
        args,
        kwargs,
        mesh,
        profile,
        name=name,
        checkpointing=checkpointing,
        micro_batches=micro_batches,
        precision=Precision.of(param_dtype, reduce_dtype),
        report=report,
        **options,
    )
    race = _Race(planner, tuple(constraints), report)
    found = list(race.run(baselines(planner.mesh)))
    optimum = race.free()
    ranked = sorted(found, key=lambda c: (c.plan is None, c.plan.solver.cost_ns if c.plan else 0))
    return Contest(optimum, tuple(ranked))


def against_experts(
    planner: Planner, plan: ShardingPlan, report: Callable[[str], None] = lambda stage: None
) -> ShardingPlan:
    """A plan with its distance to the best plan of experts, under the constraints and the budget that it was made
    under; without one where no scheme has a plan. Where an expert's plan costs less, as the search under a budget is no
    proof, that is the answer.

    Args:
        planner: the one that the plan was made by.
        report: called with the name of each stage as it starts.
    """
    race = _Race(planner, plan.pins, report, best_alone=True)
    for _ in race.run(baselines(planner.mesh)):
        pass
    if race.best is None:
        return plan
    theirs, baseline = race.best
    if _is_worse(plan, theirs):
        plan = _adopted(theirs, plan.solver.bound_ns, plan.pins)
    return replace(plan, against=distance(plan, baseline.name, theirs))


@dataclass(frozen=True, eq=False)
class _Entry:
    """A plan that fits, its program without memory, and that program's solution."""

    plan: ShardingPlan
    formulation: Formulation
    solution: Solution

    @property
    def cost_ns(self) -> int:
        return self.plan.solver.cost_ns


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A baseline whose cheapest plan does not fit: its program without memory, and that program's solution."""

    baseline: Baseline
    formulation: Formulation
    solution: Solution

    @property
    def least_ns(self) -> int:
        """A bound of all its plans."""
        return self.solution.bound or 0


class _Race:
    """Plans of one model under different constraints, beside those for all contenders.

    Args:
        best_alone: whether contenders that cannot be the best need no plan.
    """

    def __init__(
        self,
        planner: Planner,
        constraints: tuple[str, ...],
        report: Callable[[str], None],
        *,
        best_alone: bool = False,
    ) -> None:
        self._best_alone = best_alone
        self._report, self._stage = report, ""
        self._planner, self._constraints = replace(planner, report=self._solving), constraints
        self._told = replace(self._planner, chooses_again=False)  # by constraints alone what is computed again
        self._best: tuple[_Entry, Baseline] | None = None

    @property
    def best(self) -> tuple[ShardingPlan, Baseline] | None:
        """The best plan so far, and the baseline that it is one of."""
        return None if self._best is None else (self._best[0].plan, self._best[1])

    def _start(self, stage: str) -> None:
        self._stage = stage
        self._report(stage)

    def _solving(self, said: str) -> None:
        self._report(f"{self._stage}, {said}")

    def run(self, entering: Sequence[Baseline]) -> Iterator[Contender]:
        """For every baseline its plan, or why there is none; where memory is short, with recomputation too."""
        waiting: list[_Waiting] = []
        for baseline in entering:
            yield from self._enter(baseline, waiting)
        while waiting:
            nearest = min(waiting, key=lambda each: each.least_ns)
            waiting.remove(nearest)
            baseline = nearest.baseline
            if self._best is not None and nearest.least_ns >= self._best[0].cost_ns:
                yield Contender(baseline.name, baseline.title, None, self._hopeless(nearest))
                continue
            self._start(f"planning {baseline.name}")
            try:
                plan = self._told.fitted(nearest.formulation, free=nearest.solution)
            except (InfeasibleError, BudgetError) as error:
                yield Contender(baseline.name, baseline.title, None, str(error))
            else:
                yield self._noted(baseline, _Entry(plan, nearest.formulation, nearest.solution))
            if baseline.recomputation is None:
                for recomputing in baseline.recomputing():
                    yield from self._enter(recomputing, waiting)

    def _enter(self, baseline: Baseline, waiting: list[_Waiting]) -> Iterator[Contender]:
        """The plan of a baseline that fits as it is, or why there is none; any other waits for its turn. Nothing of one
        that cannot be the best, where that alone is asked for.
        """
        self._start(f"planning {baseline.name}")
        try:
            formulation = self._formulate(self._told, baseline.constraints(self._planner.mesh))
            formulation, solution = self._told.solved(formulation, self._cutoff_ns)
        except (ConstraintError, InfeasibleError) as error:
            yield Contender(baseline.name, baseline.title, None, str(error))
            return
        if (solution.bound or 0) >= self._cutoff_ns:
            return
        plan, limit = self._told.write(formulation, solution), self._planner.limit
        timeline = timeline_of(formulation.graph, plan, limit.policy, self._told.results)
        if limit.allowed_bytes is None or timeline.peak.size_bytes <= limit.allowed_bytes:
            plan = replace(plan, memory=limit.outcome(timeline))
            yield self._noted(baseline, _Entry(plan, formulation, solution))
            return
        waiting.append(_Waiting(baseline, formulation, solution))

    @property
    def _cutoff_ns(self) -> float:
        """What a contender must be below for a plan."""
        return self._best[0].cost_ns if self._best_alone and self._best is not None else math.inf

    def _noted(self, baseline: Baseline, found: _Entry) -> Contender:
        if self._best is None or found.cost_ns < self._best[0].cost_ns:
            self._best = found, baseline
        return Contender(baseline.name, f"{baseline.title}{_also_said(found.formulation)}", found.plan)

    def _hopeless(self, waiting: _Waiting) -> str:
        """Why a baseline is not searched."""
        assert self._best is not None
        budget = self._planner.limit.budget_bytes
        assert budget is not None
        least, (best, other) = format_seconds(waiting.least_ns / 1e9), self._best
        return (
            f"not searched under {format_bytes(budget)} per rank: without a budget it takes {least} already, and "
            f"{other.name} within it {format_seconds(best.cost_ns / 1e9)}"
        )

    def free(self) -> Contender:
        """The optimum, from the best baseline on."""
        self._start("planning the optimum")
        if self._best is None:
            return Contender(OPTIMUM, "least predicted time", self._fitted(self._planner, ()))
        best, baseline = self._best
        free = self._planner.having(asked=best.formulation.asked)
        plan, reason = self._tried(free, ()), ""
        if baseline.again and _is_worse(plan, best.plan):
            # What the baseline computes again was no choice of the optimum's program, or was not found in it.
            plan = self._tried(self._told.having(asked=best.formulation.asked), baseline.again)
            reason = f"plans that compute again what {baseline.name} does ({' and '.join(baseline.again)})"
        if plan is None or _is_worse(plan, best.plan):
            pins = gather_constraints((*self._constraints, *baseline.again), self._planner.mesh).texts
            plan = _adopted(best.plan, 0 if plan is None else plan.solver.bound_ns, pins)
        return Contender(OPTIMUM, "least predicted time", plan, reason)

    def _tried(self, planner: Planner, texts: tuple[str, ...]) -> ShardingPlan | None:
        """The plan under further constraints, from the best baseline on; None where the search finds none that fits."""
        try:
            return self._fitted(planner, texts, self._best)
        except BudgetError:
            return None

    def _fitted(
        self, planner: Planner, texts: tuple[str, ...], best: tuple[_Entry, Baseline] | None = None
    ) -> ShardingPlan:
        formulation = self._formulate(planner, texts)
        return planner.fitted(formulation, None if best is None else _same_choices(best[0], formulation))

    def _formulate(self, planner: Planner, texts: tuple[str, ...]) -> Formulation:
        return planner.formulate(gather_constraints((*self._constraints, *texts), planner.mesh))


def _also_said(formulation: Formulation) -> str:
    """For which operators the schemes of a program gather, and which matrices they leave to the solver, in words."""
    schemes = [each for each in formulation.constraints if isinstance(each, AxisScheme)]
    gathering = dict.fromkeys(name for each in schemes for name in each.gathering)
    leaving = dict.fromkeys(name for each in schemes for name in each.leaving)
    return _listed(", gathering for ", *gathering) + _listed(", leaving ", *leaving)


def _listed(what: str, first: str = "", *others: str) -> str:
    return f"{what}{first}{f' and {len(others)} more' if others else ''}" if first else ""


def _is_worse(plan: ShardingPlan | None, than: ShardingPlan) -> bool:
    return plan is None or plan.solver.cost_ns > than.solver.cost_ns


def _adopted(best: ShardingPlan, bound_ns: int, pins: tuple[str, ...]) -> ShardingPlan:
    """A baseline's plan as the answer of the program without its schemes, with that program's bound.

    Under a budget the search for the optimum is no proof: what it finds may cost more than what a baseline found.
    """
    cost = best.solver.cost_ns
    return replace(best, solver=best.solver.having(cost, min(bound_ns, cost)), pins=pins)


def _same_choices(made: _Entry, free: Formulation) -> tuple[int, ...]:
    """The strategies of a program's first solution, by their numbers in one with more of them that computes no more
    operators again.
    """
    narrow, choices = made.formulation, made.solution.choices
    assert choices is not None
    chosen = [strategies[choice] for strategies, choice in zip(narrow.strategies, choices)]
    operators = {(node.phase, node.name): strategy for node, strategy in zip(narrow.graph.nodes, chosen)}
    wanted = [operators[node.phase, node.name] for node in free.graph.nodes]
    wanted += chosen[len(narrow.graph.nodes) :]
    return tuple(wider.index(strategy) for wider, strategy in zip(free.strategies, wanted, strict=True))
