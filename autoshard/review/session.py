"""What ``check``, ``explain`` and ``replan`` share: a plan and its model as a problem that can be priced and solved."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from cost_models import Profile, ProfileError, load_profile
from solver import Routes, Solution, SolveReport, Status

from ..capture import in_mode, recomputed
from ..constraints import Constraints, gather_constraints
from ..errors import ConstraintError, PlanMismatchError
from ..layout import Layout
from ..mesh import HybridMesh, Mesh
from ..planning import Formulation, MemoryLimit, Planner, TensorNetwork, profile_of, solve, timeline_of
from ..plans import ShardingPlan
from ..strategies import Strategy, asked_by
from .decisions import Decisions, choices_of, decision_text, decisions_of
from .fewest_changes import cheapest_nearest
from .file_slips import PUT_BACK, slips_of

Progress = Callable[[str], None]


class Conditions(TypedDict, total=False):
    """Under what a question about a plan is answered; each may be left out.

    Attributes:
        mesh: the plan's mesh, where its ranks have an order of their own; by default the plan's.
        hardware: the profile to price with, its name or its file; by default the one that the plan names, as it is now.
        backend, time_limit_s: of the solver, as for :func:`autoshard.plan`.
        progress: called with the name of each stage as it starts.
    """

    mesh: Mesh | HybridMesh | str | Mapping[str, int] | None
    hardware: str | Profile | None
    backend: str
    time_limit_s: float | None
    progress: Progress | None


def planner_of(
    plan: ShardingPlan, model: nn.Module, args: Any, kwargs: dict[str, Any] | None, **conditions: Unpack[Conditions]
) -> Planner:
    """A planner for a model as it is now, with the objective, the micro-batches, the dtypes, the schedule and the
    memory limit that a plan was made with (by the allocator's margin of the profile as it is now), and with what the
    plan computes again in the backward: constraints add to that, or take from it (``keep``). The model is captured with
    a backward if the plan has one, and in the mode (training or evaluation) that the plan was made for.

    Raises:
        CaptureError, ProfileError: the model cannot be captured, the profile not be read.
    """
    given, hardware = conditions.get("mesh"), conditions.get("hardware")
    mesh = plan.mesh if given is None else given
    profile = _recorded_profile(plan) if hardware is None else profile_of(hardware)
    report = reporter(conditions)
    made = partial(
        Planner.of_model,
        model,
        args,
        kwargs,
        mesh,
        profile,
        name=plan.model,
        report=report,
        objective=plan.objective,
        backend=conditions.get("backend", "auto"),
        time_limit_s=conditions.get("time_limit_s"),
        tie_layers=plan.solver.identical_layers != "free",
        limit=replace(limit_of(plan), allocator_margin=profile.allocator_margin),
        checkpointing="none",
        micro_batches=plan.micro_batches,
        precision=plan.precision,
        bucket_bytes=plan.bucket_bytes,
        gathers_ahead=plan.gathers_ahead,
    )
    with torch.set_grad_enabled(any(entry.phase == "backward" for entry in plan.operators)):
        planner = made()
        if planner.graph.fingerprint != plan.fingerprint:
            with in_mode(model, not model.training):
                other = made()
            planner = other if other.graph.fingerprint == plan.fingerprint else planner
    graph = recomputed(planner.graph, plan.recomputed)
    chosen = {entry.name: Strategy(entry.inputs, entry.outputs) for entry in plan.operators}
    chosen |= {entry.name: Strategy((), (entry.layout,)) for entry in plan.inputs}
    return planner.having(graph=graph, asked=asked_by(graph, chosen))


def reporter(conditions: Conditions) -> Progress:
    """What is called with the name of each stage; where nobody watches, a function that does nothing."""
    return conditions.get("progress") or (lambda stage: None)


def _recorded_profile(plan: ShardingPlan) -> Profile:
    """The profile that a plan names, as it is now."""
    try:
        return load_profile(plan.hardware)
    except ProfileError as error:
        if os.path.exists(plan.hardware):
            raise
        raise ProfileError(
            f"the plan was priced with the profile {plan.hardware!r}, which is no preset; give its file as hardware "
            f"({error})"
        ) from None


def constraints_of(plan: ShardingPlan) -> Constraints:
    """The constraints that a plan was made under."""
    return gather_constraints(plan.pins, plan.mesh)


def check_model(plan: ShardingPlan, planner: Planner, text: str = "", source: str = "the plan file") -> None:
    """Checks that a planner has the graph that a plan was made for, and that the plan lists what is in it.

    Args:
        text, source: the file and its name, so that an error can say in which line it is wrong.

    Raises:
        PlanMismatchError: it has another, or the plan lists other names, shapes or dtypes.
    """
    if plan.fingerprint != planner.graph.fingerprint:
        raise PlanMismatchError(
            "the plan was made for another model, or for other shapes; `autoshard check` says what is different, and "
            "`autoshard plan` makes a plan for what the model is now"
        )
    slips = slips_of(plan, planner.graph, text)
    if slips:
        more = f" {len(slips) - 1} more like it, which `autoshard check` lists." if len(slips) > 1 else ""
        at = f"{source}, {slips[0]}" if slips[0].startswith("line ") else f"{source}: {slips[0]}"
        raise PlanMismatchError(f"{at}{'' if at.endswith('?') else '.'}{more} {PUT_BACK}")


@dataclass(frozen=True, eq=False)
class Priced:
    """A plan's own decisions in a formulation: its choices, and the plan as it is priced now."""

    formulation: Formulation
    decisions: Decisions
    solution: Solution
    plan: ShardingPlan

    @property
    def choices(self) -> tuple[int, ...]:
        """The choice of every solver node."""
        assert self.solution.choices is not None
        return self.solution.choices


def priced(plan: ShardingPlan, planner: Planner, formulation: Formulation) -> Priced:
    """Prices a plan's decisions in a formulation of its graph; what the plan does not list is chosen best.

    Raises:
        ConstraintError: a decision is one that its tensor or operator cannot have, or that the constraints forbid.
    """
    decisions = decisions_of(plan, formulation)
    choices = choices_of(decisions, formulation)
    for name, decision, choice in zip(formulation.names, decisions, choices):
        if decision is not None and choice is None:
            raise ConstraintError(
                f"the plan gives {name} {decision_text(decision, formulation)}, which it cannot have under the plan's "
                "constraints and the verified rules; if the file was edited by hand, make a plan of it with "
                "`autoshard replan`"
            )
    known = {node: choice for node, choice in enumerate(choices) if choice is not None}
    solution = _completed(formulation, known, plan)
    if solution is None:
        raise ConstraintError(
            "the plan's decisions do not fit together: no way leads from one layout to another that it wants; if the "
            "file was edited by hand, `autoshard replan` makes a plan of it"
        )
    return Priced(formulation, decisions, solution, planner.write(formulation, solution))


def best_plan(planner: Planner, constraints: Constraints, wanted: Decisions) -> ShardingPlan:
    """The cheapest plan under constraints and the planner's memory limit, of several the one nearest to decisions.

    Where the budget binds, the plan is the one that the search within it finds (:mod:`autoshard.planning.budget`),
    whatever it changes.

    Raises:
        ConstraintError, InfeasibleError, BudgetError: there is none.
    """
    formulation = planner.formulate(constraints)
    with constraints.located():
        solution = cheapest_nearest(planner, formulation, choices_of(wanted, formulation))
    plan = with_memory(planner, planner.write(formulation, solution))
    return plan if is_within_budget(plan) else planner.plan(constraints)


def _completed(formulation: Formulation, known: dict[int, int], plan: ShardingPlan) -> Solution | None:
    """The solution in which the known nodes have their choices and the solver decides the others; by the plan's routes,
    as far as they lead to what is wanted.
    """
    problem = replace(formulation.problem, ties=())
    choices: tuple[int, ...] | None = tuple(known.get(node, 0) for node in range(len(problem.nodes)))
    if len(known) < len(problem.nodes):
        choices = solve(replace(problem, fixed=dict(problem.fixed) | known)).choices
    return None if choices is None else solution_of(formulation, choices, routes_of(plan, formulation))


def routes_of(plan: ShardingPlan, formulation: Formulation) -> tuple[Routes, ...]:
    """The steps that a plan takes in each phase, as routes of the networks."""
    taken: dict[tuple[str, str], set[tuple[Layout, Layout]]] = defaultdict(set)
    for entry in plan.redistributions:
        taken[entry.tensor, entry.phase].update(pairwise(entry.own))
    numbers = _StepNumbers()
    routes = []
    for found in formulation.networks:
        phases = (taken[found.network.name, phase] for phase in ("forward", "backward"))
        routes.append(Routes(*(numbers.of(found, steps) for steps in phases)))
    return tuple(routes)


class _StepNumbers:
    """The numbers of steps among the arcs of networks; networks of equal tensors share what is looked up in."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], dict[tuple[Layout, Layout], int]] = {}

    def of(self, found: TensorNetwork, steps: Collection[tuple[Layout, Layout]]) -> tuple[int, ...]:
        """Those of the steps that the network has, ascending."""
        if not steps:
            return ()
        key = id(found.layouts), id(found.network.tails)
        if key not in self._known:
            self._known[key] = {step: k for k, step in enumerate(found.ends())}
        return tuple(sorted(self._known[key][step] for step in steps if step in self._known[key]))


def limit_of(plan: ShardingPlan) -> MemoryLimit:
    """The memory limit that a plan was made under."""
    memory = plan.memory
    if memory is None:
        return MemoryLimit()
    return MemoryLimit(memory.optimizer, memory.budget_bytes, memory.soft_ms_per_gib, memory.allocator_margin)


def with_memory(planner: Planner, plan: ShardingPlan) -> ShardingPlan:
    """A plan that says what it needs in memory, under the planner's limit."""
    timeline = timeline_of(planner.graph, plan, planner.limit.policy)
    return replace(plan, memory=planner.limit.outcome(timeline))


def with_known_memory(planner: Planner, plan: ShardingPlan, read: ShardingPlan) -> ShardingPlan:
    """As :func:`with_memory`, of a plan that was read and priced again: what the file says of memory holds where all
    that decides it is the same.
    """
    again = replace(plan, memory=read.memory, solver=read.solver, against=read.against)
    same = limit_of(read) == planner.limit and again == read
    return replace(plan, memory=read.memory) if same and read.memory else with_memory(planner, plan)


def is_within_budget(plan: ShardingPlan) -> bool:
    """Whether a plan that knows its memory is within its budget."""
    return plan.memory is None or not plan.memory.over_bytes


def solution_of(formulation: Formulation, choices: tuple[int, ...], routes: tuple[Routes, ...] = ()) -> Solution | None:
    """Choices that are known already as a solution, by routes where they are known, too; None where they break a
    constraint (see :meth:`Formulation.routed`).
    """
    answer = formulation.routed(choices, routes)
    if answer is None:
        return None
    (_, routes), cost = answer
    return Solution(Status.FEASIBLE, choices, cost, 0, 1.0, SolveReport("none", 0.0, (), ()), routes)
