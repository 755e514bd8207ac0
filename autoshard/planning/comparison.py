"""The optimum against every baseline, by one pipeline and one prediction.

The optimum starts from the best baseline: every plan of a baseline is an assignment of the unconstrained program, where
it costs the same or less, so the optimum is never worse, even where the solver's time ends early.

People compute again only what they must. So a baseline is planned without recomputation first, and with it where its
cheapest plan without a budget does not fit the one given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

import cost_models
from solver import Solution

from ..constraints import gather_constraints
from ..constraints.baselines import Baseline, baselines
from ..errors import BudgetError, ConstraintError, InfeasibleError
from ..mesh import Mesh
from ..plans import Contender, Contest, ShardingPlan
from ..plans.schedule import BUCKET_BYTES, bucket_size
from ..precision import Precision
from .formulation import Formulation
from .limit import memory_limit
from .planner import Checkpointing, Planner, profile_of

OPTIMUM = "optimum"


def compare(
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    mesh: Mesh | str | Mapping[str, int],
    hardware: str | cost_models.Profile = "dgx-h100",
    constraints: Sequence[str] = (),
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
        model, args, kwargs, mesh, hardware, backend, optimizer, memory, micro_batches, bucket, param_dtype,
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
    options = {"backend": backend, "time_limit_s": time_limit_s, "limit": limit, "bucket_bytes": bucket_bytes}
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
    found = [contender for baseline in baselines(planner.mesh) for contender in race.run(baseline)]
    optimum = race.free()
    ranked = sorted(found, key=lambda c: (c.plan is None, c.plan.solver.cost_ns if c.plan else 0))
    return Contest(optimum, tuple(ranked))


@dataclass(frozen=True, eq=False)
class _Entry:
    """A plan that fits, its program without memory, and the solutions of :meth:`Planner.fitted`."""

    plan: ShardingPlan
    formulation: Formulation
    solutions: tuple[Solution, ...]

    @property
    def cost_ns(self) -> int:
        return self.plan.solver.cost_ns

    @property
    def gave_way(self) -> bool:
        """Whether the cheapest plan without a budget was over the budget."""
        return len(self.solutions) > 1


class _Race:
    """Plans of one model under different constraints, beside those for all contenders."""

    def __init__(self, planner: Planner, constraints: tuple[str, ...], report: Callable[[str], None]) -> None:
        self._report, self._stage = report, ""
        self._planner, self._constraints = replace(planner, report=self._solving), constraints
        self._told = replace(self._planner, chooses_again=False)  # by constraints alone what is computed again
        self._best: tuple[_Entry, Baseline] | None = None

    def _start(self, stage: str) -> None:
        self._stage = stage
        self._report(stage)

    def _solving(self, said: str) -> None:
        self._report(f"{self._stage}, {said}")

    def run(self, baseline: Baseline) -> Iterator[Contender]:
        """The plan of a baseline, or why there is none; where memory is short, its plans with recomputation too."""
        self._start(f"planning {baseline.name}")
        try:
            found = self._fitted(self._told, baseline.constraints(self._planner.mesh))
        except (ConstraintError, InfeasibleError, BudgetError) as error:
            yield Contender(baseline.name, baseline.title, None, str(error))
            is_short = isinstance(error, BudgetError)
        else:
            yield Contender(baseline.name, baseline.title, found.plan)
            is_short = found.gave_way
            if self._best is None or found.cost_ns < self._best[0].cost_ns:
                self._best = found, baseline
        if is_short and baseline.recomputation is None:
            for recomputing in baseline.recomputing():
                yield from self.run(recomputing)

    def free(self) -> Contender:
        """The optimum, from the best baseline on."""
        self._start("planning the optimum")
        if self._best is None:
            return Contender(OPTIMUM, "least predicted time", self._fitted(self._planner, ()).plan)
        best, baseline = self._best
        plan, reason = self._tried(self._planner, ()), ""
        if baseline.again and _is_worse(plan, best.plan):
            # What the baseline computes again was no choice of the optimum's program, or was not found in it.
            plan = self._tried(self._told, baseline.again)
            reason = f"plans that compute again what {baseline.name} does ({' and '.join(baseline.again)})"
        if plan is None or _is_worse(plan, best.plan):
            pins = gather_constraints((*self._constraints, *baseline.again), self._planner.mesh).texts
            plan = _adopted(best.plan, 0 if plan is None else plan.solver.bound_ns, pins)
        return Contender(OPTIMUM, "least predicted time", plan, reason)

    def _tried(self, planner: Planner, texts: tuple[str, ...]) -> ShardingPlan | None:
        """The plan under further constraints, from the best baseline on; None where the search finds none that fits."""
        try:
            return self._fitted(planner, texts, self._best).plan
        except BudgetError:
            return None

    def _fitted(self, planner: Planner, texts: tuple[str, ...], best: tuple[_Entry, Baseline] | None = None) -> _Entry:
        formulation = planner.formulate(gather_constraints((*self._constraints, *texts), planner.mesh))
        start = None if best is None else _same_choices(best[0], formulation)
        plan, solutions = planner.fitted(formulation, start)
        return _Entry(plan, formulation, solutions)


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
    narrow, choices = made.formulation, made.solutions[0].choices
    assert choices is not None
    chosen = [strategies[choice] for strategies, choice in zip(narrow.strategies, choices)]
    operators = {(node.phase, node.name): strategy for node, strategy in zip(narrow.graph.nodes, chosen)}
    wanted = [operators[node.phase, node.name] for node in free.graph.nodes]
    wanted += chosen[len(narrow.graph.nodes) :]
    return tuple(wider.index(strategy) for wider, strategy in zip(free.strategies, wanted, strict=True))
