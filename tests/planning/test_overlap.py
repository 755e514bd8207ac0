"""Overlap: a program in which what may travel beside computation costs a share of its price bounds every schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import autoshard
from autoshard.errors import PlanFileError
from autoshard.mesh import Mesh
from autoshard.planning.formulation import Formulation, Objective
from autoshard.planning.planner import Planner
from autoshard.plans import dump_plan, parse_plan
from autoshard.plans.schedule import BUCKET_BYTES, schedule
from autoshard.plans.simulation import overlapped_s, simulate
from cost_models import Profile, load_profile
from examples.llama import demo
from solver import Node, Solution, solve

from ..thorough import some_thorough

OBJECTIVE: Objective = "overlapped-step-time"
PROFILE = load_profile("cpu-gloo")
CONTENTIONS = (0.0, 0.4, 1.0)
HOST = replace(PROFILE, compute=replace(PROFILE.compute, issue_s=2e-5), meeting_s=1.5e-3, bucket_copies=True)
"""A machine whose host, ranks and buckets add to what a step does."""


@cache
def planner(contention: float, axes: str = "dp=2,tp=2", machine: Profile = PROFILE) -> Planner:
    model, args = demo()
    profile = replace(machine, contention=contention)
    return Planner.of_model(
        model, args, None, Mesh.parse(axes), profile, objective=OBJECTIVE, bucket_bytes=BUCKET_BYTES
    )


@cache
def program(contention: float, machine: Profile = PROFILE, objective: Objective = OBJECTIVE) -> Formulation:
    return planner(contention, machine=machine).having(objective=objective).program(())


def drawn(formulation: Formulation, seed: int) -> Solution:
    """What is cheapest at random prices of operators."""
    draws = np.random.default_rng(seed)
    free = formulation.problem
    nodes = tuple(Node(node.name, draws.integers(0, 10**6, node.costs.shape)) for node in free.nodes)
    networks = tuple(replace(network, costs=network.costs // 1000) for network in free.networks)
    return solve(replace(free, nodes=nodes, networks=networks), relative_gap=1e9)


def counted(formulation: Formulation, solution: Solution) -> int:
    """What a program counts for a solution."""
    assert solution.choices is not None
    answer = formulation.routed(solution.choices)
    assert answer is not None
    return answer[1]


@pytest.mark.parametrize("contention", some_thorough(CONTENTIONS, (0.0,)))
@pytest.mark.parametrize("seed", some_thorough(range(4), (1, 2, 3)))
@pytest.mark.parametrize("machine", [PROFILE, HOST], ids=["device", "host"])
def test_no_schedule_takes_less_than_the_program_counts(contention: float, seed: int, machine: Profile) -> None:
    formulation = program(contention, machine)
    solution = drawn(formulation, seed)
    plan, counted_ns = planner(contention, machine=machine).write(formulation, solution), counted(formulation, solution)
    rounded = len(plan.operators) + len(plan.parameters) + 2 * len(plan.redistributions)
    assert counted_ns <= plan.solver.cost_ns + rounded
    assert plan.solver.cost_ns == round(overlapped_s(plan) * 1e9)
    hidden = simulate(plan).hidden_ns
    assert hidden > 0, "nothing hides, so nothing was checked"
    assert any(bucket.is_early for bucket in schedule(plan).buckets), "no activation sets out early"
    assert plan.solver.cost_ns == pytest.approx(plan.step_s * 1e9 - (1 - contention) * hidden, abs=2)


@pytest.mark.parametrize("seed", some_thorough(range(4), (0, 1)))
def test_what_an_activations_first_reader_waits_for_counts_whole(seed: int) -> None:
    """So a program counts more than the share of all activations that have a late reader, and no more than all."""
    overlapped, summed = program(0.0), program(0.0, objective="step-time")
    shares_all = replace(overlapped, free=replace(overlapped.free, edges=summed.free.edges))
    solution = drawn(summed, seed)
    assert counted(shares_all, solution) < counted(overlapped, solution) < counted(summed, solution)


def test_at_full_contention_both_objectives_are_one_program() -> None:
    overlapped, summed = program(1.0), program(1.0, objective="step-time")
    for ours, theirs in zip(overlapped.problem.networks, summed.problem.networks, strict=True):
        assert np.array_equal(ours.costs, theirs.costs)
    for node, other in zip(overlapped.problem.nodes, summed.problem.nodes, strict=True):
        assert np.array_equal(node.costs, other.costs)


@pytest.mark.filterwarnings("ignore:the plan is not proven optimal")
def test_the_plan_is_the_shorter_of_those_that_count_on_all_and_on_nothing_to_hide() -> None:
    model, args = demo()
    profile = replace(PROFILE, contention=0.4)
    plans = {
        objective: autoshard.plan(model, args, mesh="dp=2,tp=2", hardware=profile, objective=objective, cache=False)
        for objective in (OBJECTIVE, "step-time")
    }
    found, other = plans[OBJECTIVE], plans["step-time"]
    assert found.objective == OBJECTIVE and found.contention == 0.4
    assert found.solver.bound_ns <= found.solver.cost_ns <= round(overlapped_s(other) * 1e9)
    assert found.solver.bound_ns < other.solver.bound_ns, "what hides costs less"
    assert parse_plan(dump_plan(found)) == found


@pytest.mark.filterwarnings("ignore:the plan is not proven optimal")
def test_a_file_whose_cost_is_not_that_of_its_schedule_is_refused() -> None:
    model, args = demo()
    profile = replace(PROFILE, contention=0.4)
    plan = autoshard.plan(model, args, mesh="dp=2,tp=2", hardware=profile, objective=OBJECTIVE, cache=False)
    text = dump_plan(plan)
    assert "contention: 0.4}" in text
    with pytest.raises(PlanFileError, match="less what hides"):
        parse_plan(text.replace("contention: 0.4}", "contention: 0.9}"))
