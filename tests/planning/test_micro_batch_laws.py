"""What a step of several micro-batches costs and holds: laws of the program, beside exhaustive search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

import autoshard
from autoshard.capture import micro_batched
from autoshard.constraints import gather_constraints
from autoshard.errors import InputError
from autoshard.mesh import Mesh
from autoshard.micro_batches import is_summed
from autoshard.planning import Planner, formulate, memory_limit, timeline_of
from autoshard.planning.lives import _Course, with_lives
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.plans.units import format_bytes
from autoshard.plans.views.show import headline
from autoshard.plans.views.summary import summarize
from autoshard.review import check
from solver.evaluate import usage_timeline

from ..distributed import cases
from ..plans_of import profile_of
from .test_lives import POLICY, at_steps, drawn

MANY = (2, 3, 4)


@cache
def planner_of(
    case: str, axes: str, micro_batches: int, optimizer: str = "adamw", memory: int | None = None
) -> Planner:
    model, args = cases.make(case)
    profile = cases.slow_machine()
    limit = memory_limit(optimizer, memory, None, profile)
    return Planner.of_model(model, args, None, axes, profile, micro_batches=micro_batches, limit=limit)


def planned(planner: Planner, constraints: Sequence[str] = ("x=dp:S(0)",)) -> ShardingPlan:
    return planner.plan(gather_constraints(constraints, planner.mesh))


def test_one_micro_batch_is_the_graph_as_it_was() -> None:
    graph = cases.graph("mlp")
    assert micro_batched(graph, 1) is graph
    assert micro_batched(graph, 4).fingerprint == graph.fingerprint


def test_numbers_that_cannot_be_are_refused() -> None:
    graph = cases.graph("mlp")
    with pytest.raises(InputError, match="micro_batches is 0: expected a number from 1 up"):
        micro_batched(graph, 0)
    with pytest.raises(InputError, match="needs gradients, but the model has none"):
        micro_batched(replace(graph, gradients=()), 2)


@pytest.mark.parametrize("scheme", ["fsdp", "ddp"])
def test_micro_batches_that_hold_nothing_cost_as_many_steps_of_one_and_the_additions(scheme: str) -> None:
    """Nothing is held where copies and sums lie as the parameters do; without the optimizer, which steps once, and
    without a schedule, which steps of several have none of.
    """
    constraints = [f"family dp={scheme}"]
    one = planned(replace(planner_of("mlp", "dp=4", 1, "none"), bucket_bytes=0), constraints)
    for many in MANY:
        layouts = {entry.name: entry.layout for entry in one.parameters}
        pins = [
            f"{module}/{held}_{name}={'dp:R' if layouts[f'{module}.{name}'].is_replicated else 'dp:S(0)'}"
            for module, held, name in product(("up", "down"), ("held", "summed"), ("weight", "bias"))
        ]
        plan = planned(planner_of("mlp", "dp=4", many, "none"), [*constraints, *pins])
        additions = sum(entry.predicted_ns for entry in plan.execution if is_summed(entry.name))
        assert plan.solver.cost_ns == many * one.solver.cost_ns + (many - 1) * additions


def test_the_optimum_is_the_cheapest_of_all_layouts_of_a_parameter_its_copy_and_its_sum() -> None:
    planner = planner_of("mlp", "dp=2", 3)
    cut = ("dp:R", "dp:S(0)", "dp:S(1)")
    others = ("x=dp:S(0)", "down.*=dp:R", "down/held_*=dp:R", "down/summed_*=dp:R", "up.bias=dp:R")
    free = planned(planner, others)
    costs = {
        (stored, held, summed): planned(
            planner, (*others, f"up.weight={stored}", f"up/held_weight={held}", f"up/summed_weight={summed}")
        ).solver.cost_ns
        for stored, held, summed in product(cut, cut, (*cut, "dp:P(sum)"))
    }
    assert free.solver.cost_ns == min(costs.values())
    assert len(set(costs.values())) > 10


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_the_optimum_is_concave_in_the_number_of_micro_batches(share: float) -> None:
    """Each plan costs something once and something in each micro-batch; what it holds does not depend on how many."""
    free = planned(planner_of("mlp", "dp=2,tp=2", 2))
    assert free.memory is not None
    memory = int(share * free.memory.peak.size_bytes) if share < 1 else None
    two, three, four = (planned(planner_of("mlp", "dp=2,tp=2", many, memory=memory)).solver.cost_ns for many in MANY)
    assert two < three < four
    assert 2 * three >= two + four


def test_the_cost_never_falls_as_the_budget_shrinks() -> None:
    free = planned(planner_of("mlp", "dp=2,tp=2", 4))
    assert free.memory is not None
    budgets = [int(share * free.memory.peak.size_bytes) for share in (1.0, 0.97, 0.94, 0.9)]
    plans = [planned(planner_of("mlp", "dp=2,tp=2", 4, memory=budget)) for budget in budgets]
    costs = [plan.solver.cost_ns for plan in plans]
    assert costs == sorted(costs) and costs[0] < costs[-1]
    assert all(plan.memory and plan.memory.peak.size_bytes <= budget for plan, budget in zip(plans, budgets))


def test_what_the_step_takes_follows_from_the_entries_of_the_plan() -> None:
    plan = planned(planner_of("llama", "dp=2,tp=2", 4), ["family dp=ddp"])
    assert {plan.runs(entry) for entry in plan.redistributions} == {1, 4}
    additions = sum(entry.predicted_ns for entry in plan.execution if is_summed(entry.name))
    others = sum(entry.predicted_ns for entry in plan.execution if not is_summed(entry.name))
    assert plan.compute_s == pytest.approx((4 * others + 3 * additions) / 1e9, rel=1e-4)
    assert parse_plan(dump_plan(plan)) == plan


def test_check_finds_a_plan_of_micro_batches_as_it_was() -> None:
    model, args = cases.make("mlp")
    profile = cases.slow_machine()
    plan = autoshard.plan(model, args, mesh="dp=4", hardware=profile, constraints="family dp=ddp", micro_batches=4)
    found = check(plan, model, args, hardware=profile)
    assert found.fits, found
    assert found.now_ns == found.best_ns == plan.solver.cost_ns


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("case", "axes"), [("mlp", "dp=2,tp=2"), ("mlp odd", "dp=2,tp=2"), ("llama of 1", "dp=2,tp=2"), ("gpt2", "dp=4")]
)
def test_the_program_never_counts_more_than_the_timeline(case: str, axes: str, seed: int) -> None:
    graph = micro_batched(cases.graph(case), 4)
    formulation = formulate(graph, Mesh.parse(axes), profile_of("slow"), tie_layers=False)
    assignment, plan = drawn(formulation, seed)
    problem, course = with_lives(formulation, POLICY).problem, _Course.of(graph)
    timeline = timeline_of(graph, plan, POLICY)
    most: dict[tuple[str, str], int] = {}
    for point in timeline.points:
        key = (point.phase, point.operator)
        most[key] = max(point.size_bytes, most.get(key, 0))
    steps = {(graph.nodes[i].phase, graph.nodes[i].name): step for i, step in course.step.items()}
    shared = sorted(steps.keys() & most.keys())
    assert len(shared) > 0.5 * len(steps)
    counted = dict(zip(shared, at_steps(problem, assignment, [steps[key] for key in shared])))
    assert not [(key, counted[key], most[key]) for key in shared if counted[key] > most[key]]
    peak = max(size for _, size in usage_timeline(problem, *assignment))
    assert 0.8 * timeline.peak.size_bytes <= peak <= timeline.peak.size_bytes


def test_show_says_what_a_step_holds() -> None:
    plan = planned(planner_of("mlp", "dp=4", 4), ["family dp=ddp"])
    summary = summarize(plan)
    assert {(total.what, total.layout, total.stored) for total in summary.held} == {("sum", "dp:P(sum)", "dp:R")}
    held = sum(total.size_bytes for total in summary.held)
    assert held == summary.parameter_bytes
    assert f"a step of 4 micro-batches: holds no copies beside parameters, 4 sums of {format_bytes(held)}" in "\n".join(
        headline(summary)
    )
    collectives = sum(total.count for total in summary.collectives)
    assert collectives == sum(plan.runs(entry) * len(entry.collectives) for entry in plan.redistributions)
