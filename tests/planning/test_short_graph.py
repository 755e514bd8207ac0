"""The program of a graph without identical layers against that of the whole one, and what is written of its plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.capture import Ref, capture
from autoshard.constraints import parse_constraint
from autoshard.errors import PlanFileError
from autoshard.lowering import Results
from autoshard.mesh import Mesh
from autoshard.planning import Formulation, Objective, formulate, interpret
from autoshard.planning.short_graph import short_graphs, times_of
from autoshard.planning.shortened import shortened
from autoshard.planning.timeline import _corners, timeline, timeline_of
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.plans.schedule import BUCKET_BYTES
from autoshard.plans.simulation import overlapped_s
from autoshard.plans.text.folded_plan import fold_plan
from cost_models import optimizer_policy
from solver import Routes, Solution, solve

from ..plans_of import profile_of
from ..thorough import some_thorough
from .deep_models import DEEP, DEEP_MODELS, WHOLE, Wide, drawn, graph_of

POLICY = optimizer_policy("adamw")
PLAIN: Objective = "step-time"
HIDES: Objective = "overlapped-step-time"


def program_of(name: str, axes: str, objective: Objective, shortens: bool) -> Formulation:
    return formulate(
        graph_of(name),
        Mesh.of(axes),
        replace(profile_of("slow"), contention=0.5),
        objective=objective,
        bucket_bytes=BUCKET_BYTES,
        policy=POLICY,
        shortens=shortens,
    )


def origins(short: Formulation) -> list[int]:
    """For every node of the whole graph the one that stands for it."""
    found = list(range(len(short.whole.nodes)))
    for each in short.shorts:
        found = [each.origin[i] for i in found]
    return found


def said_of_all(short: Formulation, whole: Formulation, solution: Solution) -> Solution:
    """A solution of the program without layers as one of the whole program."""
    assert solution.choices is not None
    origin, of_tensor = origins(short), {found.ref: k for k, found in enumerate(short.networks)}
    choices = (*(solution.choices[i] for i in origin), *solution.choices[len(short.graph.nodes) :])
    places = (of_tensor[Ref(origin[found.ref.node], found.ref.output)] for found in whole.networks)
    routes: tuple[Routes, ...] = tuple(solution.routes[k] for k in places)
    return replace(solution, choices=choices, routes=routes)


def plan_of(program: Formulation, solution: Solution) -> ShardingPlan:
    plan = interpret(program, solution, profile_of("slow"), "", "")
    if program.objective == HIDES:
        cost_ns = round(overlapped_s(plan) * 1e9)
        plan = replace(plan, solver=plan.solver.having(cost_ns, min(cost_ns, plan.solver.bound_ns)))
    return plan


def forgetful(plan: ShardingPlan) -> ShardingPlan:
    """The plan, of which nobody knows what it was made of, put in order anew."""
    sections = plan.sections
    return plan.having(type(sections)(*(tuple(reversed(each)) for each in sections[:4]), tuple(sections.execution)))


PROGRAMS = [
    (name, axes, objective, seed)
    for name in DEEP_MODELS
    if name not in WHOLE
    for axes, objective, seed in (("tp=2", PLAIN, None), ("dp=2,tp=2", HIDES, None), ("tp=3", PLAIN, 1))
]
QUICK = {("llama", "dp=2,tp=2"), ("gpt2", "tp=3"), ("llama odd", "tp=3"), ("translator", "tp=2")}
SLOW = {case for case in PROGRAMS if case[0] in ("llama", "llama bf16", "gpt2") and case[:2] not in QUICK}


@pytest.mark.parametrize(("name", "axes", "objective", "seed"), some_thorough(PROGRAMS, SLOW))
def test_the_program_without_identical_layers_is_the_whole_program(
    name: str, axes: str, objective: Objective, seed: int | None
) -> None:
    short, whole = (program_of(name, axes, objective, shortens) for shortens in (True, False))
    assert len(short.graph.nodes) < len(whole.graph.nodes)
    assert sum(short.times) == len(whole.graph.nodes)
    origin = origins(short)
    assert all(mine == short.strategies[i] for mine, i in zip(whole.strategies, origin))
    assert whole.strategies[len(origin) :] == short.strategies[len(short.graph.nodes) :]

    solution = solve(short.problem if seed is None else drawn(short.problem, seed))
    if seed is None:
        best = solve(whole.problem)
        assert (solution.cost, solution.bound, solution.choices is None) == (best.cost, best.bound, False)
    plan = plan_of(short, solution)
    assert plan == plan_of(whole, said_of_all(short, whole, solution))
    assert plan == forgetful(plan)


@pytest.mark.parametrize(("name", "axes", "objective", "seed"), some_thorough(PROGRAMS, SLOW))
def test_so_are_the_file_and_what_is_held(name: str, axes: str, objective: Objective, seed: int | None) -> None:
    short = program_of(name, axes, objective, shortens=True)
    plan = plan_of(short, solve(short.problem if seed is None else drawn(short.problem, seed)))
    assert plan.shortened() is not plan
    text = dump_plan(plan)
    assert text == dump_plan(forgetful(plan))
    assert parse_plan(text, "") == plan
    assert fold_plan(plan) == fold_plan(forgetful(plan))

    known, graph = Results(), graph_of(name)
    found = timeline_of(graph, plan, POLICY, known, short.shorts)
    every = [timeline(graph, plan, POLICY, corner, known) for corner in _corners(graph, plan)]
    fullest = max(every, key=lambda each: each.peak.size_bytes)
    assert (found.points, found.at_peak, found.static) == (fullest.points, fullest.at_peak, fullest.static)
    assert dict(found.kinds) == dict(fullest.kinds)


@pytest.mark.parametrize("name", sorted(DEEP_MODELS))
def test_layers_are_left_out_where_they_are_the_same(name: str) -> None:
    graph = graph_of(name)
    shorts = short_graphs(graph)
    assert bool(shorts) == (name not in WHOLE)
    assert sum(times_of(shorts)) == (len(graph.nodes) if shorts else 0)
    for short in shorts:
        assert short.out.count >= 4
        kept = {node.name for node in short.graph.nodes}
        assert {short.out.like_name(node.name) for node in short.longer.nodes} == kept
        twice = {name for each in kept for name in short.out.names(each)}
        assert twice == {node.name for node in short.longer.nodes}


def test_the_course_goes_by_the_layers_that_the_program_left_out() -> None:
    short = program_of("llama", "dp=2,tp=2", PLAIN, shortens=True)
    plan = plan_of(short, solve(short.problem))
    steps = shortened(short.whole, plan, short.shorts)
    assert [step.graph for step in steps] == [each.graph for each in short.shorts]
    changed = replace(plan, operators=tuple(plan.operators))
    assert all(step.graph is not short.graph for step in shortened(short.whole, changed, short.shorts))


def test_a_plan_that_was_changed_since_is_written_as_it_is() -> None:
    short = program_of("chain", "tp=2", PLAIN, shortens=True)
    plan = plan_of(short, solve(short.problem))
    slower = [replace(e, predicted_ns=e.predicted_ns + (e.name == "layers.6/add")) for e in plan.execution]
    assert sum(a != b for a, b in zip(slower, plan.execution)) == 1
    changed = replace(plan, execution=tuple(slower))
    assert changed.shortened() is changed
    assert parse_plan(dump_plan(changed), "") == changed != plan


def test_what_is_said_of_the_plan_behind_it_is_said_of_the_short_one() -> None:
    short = program_of("chain", "tp=2", PLAIN, shortens=True)
    plan = replace(plan_of(short, solve(short.problem)), model="another")
    assert plan.shortened().model == "another"
    with pytest.raises(PlanFileError, match="lacks layers"):
        dump_plan(plan.shortened())


class Marked(nn.Module):
    """Layers, and behind them a mark in the model, or none."""

    def __init__(self, marked: bool) -> None:
        super().__init__()
        self.layers, self.marked = nn.ModuleList(Wide(16) for _ in range(DEEP)), marked

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (autoshard.constrain(x, "tp:R") if self.marked else x).square().mean()


@pytest.mark.parametrize("marked", [False, True])
def test_marks_in_the_model_take_the_whole_program(marked: bool) -> None:
    graph = capture(Marked(marked), (torch.randn(8, 8),))
    program = formulate(graph, Mesh.of("tp=2"), profile_of("slow"), shortens=True)
    assert bool(program.shorts) != marked


@pytest.mark.parametrize(
    "given", [{"tie_layers": False}, {"chooses_again": True}, {"constraints": ["layers.*.up.weight=tp:R"]}]
)
def test_what_may_tell_layers_apart_takes_the_whole_program(given: dict[str, Any]) -> None:
    mesh = Mesh.of("tp=2")
    given = {
        key: [parse_constraint(each, mesh) for each in value] if key == "constraints" else value
        for key, value in given.items()
    }
    program = formulate(graph_of("chain"), mesh, profile_of("slow"), shortens=True, **given)
    assert not program.shorts
    assert program.whole is program.graph


@pytest.mark.parametrize("memory", [None, "1MB"])
def test_planning_without_a_budget_leaves_layers_out(memory: str | None) -> None:
    model, args = DEEP_MODELS["chain"]()
    plan = autoshard.plan(model, args, mesh="tp=2", hardware=profile_of("slow"), memory=memory, cache=False)
    assert (plan.shortened() is plan) == (memory is not None)
