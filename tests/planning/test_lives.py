"""What the program counts against the timeline of the plan: never more, and at every operator the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from autoshard.capture import CapturedGraph
from autoshard.constraints.values import parse_constraint
from autoshard.lowering import Rank, lower
from autoshard.mesh import Mesh
from autoshard.ops import is_part
from autoshard.planning import Formulation, formulate, interpret, timeline_of
from autoshard.planning.lives import UNSCHEDULED, _Course, with_lives
from autoshard.planning.timeline import _optimizer, _Simulation
from autoshard.plans import ShardingPlan
from autoshard.plans.schedule import schedule
from cost_models import optimizer_policy
from solver import Assignment, Node, Problem, solve
from solver.evaluate import usage_timeline

from ..distributed import cases
from ..oracles import groups_of
from ..plans_of import profile_of

POLICY = optimizer_policy("adamw")
CASES = [
    ("mlp", "dp=2,tp=2"),
    ("mlp odd", "dp=2,tp=2"),
    pytest.param("llama", "dp=2,tp=2", marks=pytest.mark.thorough),
    pytest.param("llama odd", "dp=2,tp=2", marks=pytest.mark.thorough),
    ("gpt2", "dp=2,tp=2"),
    ("moe", "dp=2,tp=2"),
    ("conv", "dp=4"),
]
SEEDS = (0, pytest.param(1, marks=pytest.mark.thorough))


def drawn(formulation: Formulation, seed: int) -> tuple[Assignment, ShardingPlan]:
    """A random plan: the cheapest at random prices."""
    draws = np.random.default_rng(seed)
    free = formulation.free
    nodes = tuple(Node(n.name, draws.integers(0, 1_000_000, n.costs.shape) + n.costs) for n in free.nodes)
    networks = tuple(replace(n, costs=n.costs // 1000) for n in free.networks)
    found = solve(replace(free, nodes=nodes, networks=networks), relative_gap=1e9)
    assert found.choices is not None
    plan = interpret(formulation, replace(found, bound=0), profile_of("slow"), "", "")
    return Assignment(found.choices, found.routes), plan


def at_operators(graph: CapturedGraph, plan: ShardingPlan) -> dict[str, int]:
    """Bytes in use while each operator runs, without those that move its inputs before and its results behind it."""
    groups = groups_of(plan.mesh)
    first = (0,) * plan.mesh.ndim
    simulation = _Simulation(plan, lower(graph, plan, Rank(first, torch.device("cpu"), groups)), first)
    labels = []
    run = simulation._run

    def noted(phase: str, node: torch.fx.Node) -> None:
        labels.append(node.meta["label"])
        run(phase, node)  # type: ignore[arg-type]

    simulation._run = noted  # type: ignore[method-assign]
    course = simulation.course()
    _, optimizer = _optimizer(graph, plan, POLICY, first, len(course.moments) - 1)
    changes: Counter[int] = Counter()
    for lifetime in (*course.lifetimes, *optimizer):
        changes[lifetime.first] += lifetime.size_bytes
        changes[lifetime.last + 1] -= lifetime.size_bytes
    used = list(accumulate(changes[moment] for moment in range(len(labels))))
    most: dict[str, int] = {}
    for label, size in zip(labels, used):
        if not label.is_copy and label.operator == label.tensor:
            most[label.operator] = max(size, most.get(label.operator, 0))
    return most


def at_steps(problem: Problem, assignment: Assignment, steps: Sequence[int]) -> list[int]:
    timeline = usage_timeline(problem, *assignment)
    starts = [start for start, _ in timeline]
    return [timeline[int(np.searchsorted(starts, step, side="right")) - 1][1] for step in steps]


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("case", "axes"), CASES)
def test_the_program_never_counts_more_than_the_timeline_and_at_most_operators_the_same(
    case: str, axes: str, seed: int
) -> None:
    """Odd shapes included. Where a result is made contiguous the timeline has a copy more. Parts of an operator that is
    one kernel do not run, and are not measured.
    """
    graph = cases.graph(case)
    formulation = formulate(graph, Mesh.parse(axes), profile_of("slow"), tie_layers=False)
    assignment, plan = drawn(formulation, seed)
    problem = with_lives(formulation, POLICY).problem
    course, measured = _Course.of(graph), at_operators(graph, plan)
    names = {graph.nodes[i].name: step for i, step in course.step.items() if graph.nodes[i].name in measured}
    counted = dict(zip(names, at_steps(problem, assignment, list(names.values()))))
    run = [i for i in course.step if not is_part(graph.nodes[i])]
    assert len([i for i in run if graph.nodes[i].name in names]) > 0.9 * len(run)
    assert not [name for name in names if counted[name] > measured[name]]
    assert sum(counted[name] == measured[name] for name in names) > 0.8 * len(names)
    peak = max(size for _, size in usage_timeline(problem, *assignment))
    assert peak <= timeline_of(graph, plan, POLICY).peak.size_bytes


def test_the_optimizer_counts_its_state_and_its_steps() -> None:
    graph = cases.graph("mlp")
    formulation = formulate(graph, Mesh.parse("dp=2,tp=2"), profile_of("slow"))
    solution = solve(formulation.problem)
    plan = interpret(formulation, solution, profile_of("slow"), "", "")
    assert solution.choices is not None
    course, timeline = _Course.of(graph), timeline_of(graph, plan, POLICY)
    problem = with_lives(formulation, POLICY).problem
    steps = range(course.optimizer, course.end)
    counted = at_steps(problem, Assignment(solution.choices, solution.routes), list(steps))
    assert timeline.points[-1].size_bytes == max(counted)


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("case", "axes"), [("llama", "dp=2,tp=2"), ("gpt2", "dp=4")])
def test_with_the_schedule_of_a_plan_the_program_counts_what_is_under_way(case: str, axes: str, ahead: bool) -> None:
    """Not more than the timeline, and not less than without; under FSDP, where the most is under way."""
    graph = cases.graph(case)
    mesh = Mesh.parse(axes)
    given = [parse_constraint(f"family {axis}=fsdp", mesh) for axis in mesh.axes]
    formulation = formulate(graph, mesh, profile_of("slow"), constraints=given, bucket_bytes=1 << 20)
    solution = solve(formulation.problem)
    assert solution.choices is not None
    plan = replace(interpret(formulation, solution, profile_of("slow"), "", ""), gathers_ahead=ahead)
    course, measured = _Course.of(graph), at_operators(graph, plan)
    in_turn = [i for i in course.step if graph.nodes[i].name in measured.keys() - set(plan.deferred)]
    steps, most = [course.step[i] for i in in_turn], [measured[graph.nodes[i].name] for i in in_turn]
    answer = Assignment(solution.choices, solution.routes)
    alone, scheduled = (
        at_steps(with_lives(formulation, POLICY, found).problem, answer, steps)
        for found in (UNSCHEDULED, schedule(plan))
    )
    assert all(one <= other <= there for one, other, there in zip(alone, scheduled, most, strict=True))
    assert sum(there - other for other, there in zip(scheduled, most)) < sum(
        there - one for one, there in zip(alone, most)
    )
