"""The optimum against every baseline, by one pipeline and one prediction.

The optimum starts from the best baseline: every plan of a baseline is an assignment of the unconstrained program, where
it costs the same or less, so the optimum is never worse, even where the solver's time ends early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

import cost_models
from solver import Solution

from ..constraints import gather_constraints
from ..constraints.baselines import Baseline, baselines
from ..errors import BudgetError, ConstraintError, InfeasibleError
from ..mesh import Mesh
from ..plans import Contender, Contest, ShardingPlan, SolverOutcome
from .budget import memory_limit
from .formulation import Formulation
from .planner import Planner, profile_of

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
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Contest:
    """Plans a model freely and under every baseline of the mesh.

    Args:
        model, args, kwargs, mesh, hardware, backend, optimizer, memory, name, progress: as for :func:`autoshard.plan`.
        constraints: further ones, for the optimum and the baselines alike.
        time_limit_s: for the solver, for each contender.

    Raises:
        InfeasibleError, BudgetError: there is no plan at all.
        What :func:`autoshard.plan` raises for its arguments.
    """
    report = progress or (lambda stage: None)
    profile = profile_of(hardware)
    limit = memory_limit(optimizer, memory, None, profile)
    options = {"backend": backend, "time_limit_s": time_limit_s, "limit": limit}
    planner = Planner.of_model(
        model, args, kwargs, mesh, profile, name=name, checkpointing="as-marked", report=report, **options
    )
    race = _Race(planner, tuple(constraints))
    found = []
    for baseline in baselines(planner.mesh):
        report(f"planning {baseline.name}")
        found.append(race.run(baseline))
    report("planning the optimum")
    optimum = race.free()
    ranked = sorted(found, key=lambda c: (c.plan is None, c.plan.solver.cost_ns if c.plan else 0))
    return Contest(optimum, tuple(ranked))


class _Race:
    """Plans of one model under different constraints, beside those for all contenders."""

    def __init__(self, planner: Planner, constraints: tuple[str, ...]) -> None:
        self._planner, self._constraints = planner, constraints
        self._best: tuple[ShardingPlan, Formulation, Solution] | None = None

    def run(self, baseline: Baseline) -> Contender:
        """The plan of a baseline, or why there is none."""
        try:
            found = self._fitted((*self._constraints, *baseline.constraints(self._planner.mesh)), None)
        except (ConstraintError, InfeasibleError, BudgetError) as error:
            return Contender(baseline.name, baseline.title, None, str(error))
        if self._best is None or found[0].solver.cost_ns < self._best[0].solver.cost_ns:
            self._best = found
        return Contender(baseline.name, baseline.title, found[0])

    def free(self) -> Contender:
        """The optimum, from the best baseline on."""
        plan, *_ = self._fitted(self._constraints, self._best)
        if self._best is not None and self._best[0].solver.cost_ns < plan.solver.cost_ns:
            plan = _adopted(self._best[0], plan)
        return Contender(OPTIMUM, "least predicted time", plan)

    def _fitted(
        self, texts: tuple[str, ...], start: tuple[ShardingPlan, Formulation, Solution] | None
    ) -> tuple[ShardingPlan, Formulation, Solution]:
        """A plan that fits, its program without memory, and the solution of that program."""
        formulation = self._planner.formulate(gather_constraints(texts, self._planner.mesh))
        choices = None if start is None else _same_choices(*start[1:], formulation)
        plan, solution = self._planner.fitted(formulation, choices)
        return plan, formulation, solution


def _adopted(best: ShardingPlan, optimum: ShardingPlan) -> ShardingPlan:
    """A baseline's plan as the answer of the program without its constraints, with that program's bound.

    Under a budget the search for the optimum is no proof: what it finds may cost more than what a baseline found.
    """
    cost, bound = best.solver.cost_ns, min(optimum.solver.bound_ns, best.solver.cost_ns)
    return replace(best, solver=SolverOutcome.of(cost, bound, optimum.solver.identical_layers), pins=optimum.pins)


def _same_choices(made: Formulation, solution: Solution, free: Formulation) -> tuple[int, ...]:
    """A solution's strategies, by their numbers in a formulation with more of them."""
    assert solution.choices is not None
    return tuple(
        wider.index(narrow[choice]) for wider, narrow, choice in zip(free.strategies, made.strategies, solution.choices)
    )
