"""The optimum against every baseline, by one pipeline and one prediction.

The optimum starts from the best baseline: every plan of a baseline is an assignment of the unconstrained program, where
it costs the same or less, so the optimum is never worse, even where the solver's time ends early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

import cost_models
from solver import Solution, solve

from .api import call_text
from .baselines import Baseline, baselines
from .calls import as_arguments
from .capture import CapturedGraph, capture
from .constraints import parse_constraint
from .errors import ConstraintError, InfeasibleError
from .formulation import Formulation, formulate
from .interpretation import interpret
from .mesh import Mesh
from .plans import Contender, Contest, ShardingPlan

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
    name: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Contest:
    """Plans a model freely and under every baseline of the mesh.

    Args:
        model, args, kwargs, mesh, hardware, backend, name, progress: as for :func:`autoshard.plan`.
        constraints: further ones, for the optimum and the baselines alike.
        time_limit_s: for the solver, for each contender.

    Raises:
        InfeasibleError: there is no plan at all.
        What :func:`autoshard.plan` raises for its arguments.
    """
    args = as_arguments(args)
    report = progress or (lambda stage: None)
    mesh = Mesh.of(mesh)
    profile = hardware if isinstance(hardware, cost_models.Profile) else cost_models.load_profile(hardware)
    report("capturing the training step")
    graph = capture(model, args, kwargs)
    call = call_text(model, args, kwargs or {})
    race = _Race(graph, mesh, profile, tuple(constraints), backend, time_limit_s, name or type(model).__name__, call)
    found = []
    for baseline in baselines(mesh):
        report(f"planning {baseline.name}")
        found.append(race.run(baseline))
    report("planning the optimum")
    optimum = race.free()
    ranked = sorted(found, key=lambda c: (c.plan is None, c.plan.solver.cost_ns if c.plan else 0))
    return Contest(optimum, tuple(ranked))


class _Race:
    """Plans of one graph under different constraints."""

    def __init__(
        self,
        graph: CapturedGraph,
        mesh: Mesh,
        profile: cost_models.Profile,
        constraints: tuple[str, ...],
        backend: str,
        time_limit_s: float | None,
        name: str,
        call: str,
    ) -> None:
        self._graph, self._mesh, self._profile, self._constraints = graph, mesh, profile, constraints
        self._backend, self._time_limit_s, self._name, self._call = backend, time_limit_s, name, call
        self._best: tuple[int, Formulation, Solution] | None = None

    def run(self, baseline: Baseline) -> Contender:
        """The plan of a baseline, or why there is none."""
        try:
            formulation = self._formulate((*self._constraints, *baseline.constraints(self._mesh)))
            plan, solution = self._solve(formulation, None)
        except (ConstraintError, InfeasibleError) as error:
            return Contender(baseline.name, baseline.title, None, str(error))
        assert solution.cost is not None
        if self._best is None or solution.cost < self._best[0]:
            self._best = (solution.cost, formulation, solution)
        return Contender(baseline.name, baseline.title, plan)

    def free(self) -> Contender:
        """The optimum, from the best baseline so far on."""
        formulation = self._formulate(self._constraints)
        start = None if self._best is None else _same_choices(*self._best[1:], formulation)
        plan, _ = self._solve(formulation, start)
        return Contender(OPTIMUM, "least predicted time", plan)

    def _formulate(self, constraints: tuple[str, ...]) -> Formulation:
        parsed = [parse_constraint(text, self._mesh) for text in constraints]
        return formulate(self._graph, self._mesh, self._profile, constraints=parsed)

    def _solve(self, formulation: Formulation, start: tuple[int, ...] | None) -> tuple[ShardingPlan, Solution]:
        solution = solve(formulation.problem, backend=self._backend, time_limit_s=self._time_limit_s, start=start)
        if solution.choices is None:
            raise InfeasibleError(f"no plan: {solution.status.value} {solution.report.explanation}".rstrip())
        return interpret(formulation, solution, self._profile, self._name, self._call), solution


def _same_choices(made: Formulation, solution: Solution, free: Formulation) -> tuple[int, ...]:
    """A solution's strategies, by their numbers in a formulation with more of them."""
    assert solution.choices is not None
    return tuple(
        wider.index(narrow[choice]) for wider, narrow, choice in zip(free.strategies, made.strategies, solution.choices)
    )
