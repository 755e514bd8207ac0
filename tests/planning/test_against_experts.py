"""A plan held against experts: the best of their plans, under the same constraints, and where the two differ."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import pytest

import autoshard
from autoshard.planning import Planner, against_experts, memory_limit
from autoshard.planning.comparison import compare
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.plans.expert_distance import SENT
from cost_models import load_profile

from ..models import EXAMPLES, blocks
from ..thorough import some_thorough
from .test_comparison import PLAIN_BUDGET, plain

MESH = {"mesh": "dp=2,tp=2", "hardware": "cpu-gloo"}


def planned(**options: Any) -> ShardingPlan:
    return autoshard.plan(*EXAMPLES["llama"](), **{**MESH, "against": "experts", "cache": False, "name": "L"} | options)


def check(plan: ShardingPlan) -> None:
    """The parts come to the distance; a plan file keeps all of it."""
    against = plan.against
    assert against is not None and parse_plan(dump_plan(plan)) == plan
    gained = (against.compute_s - plan.compute_s, against.communication_s - plan.communication_s)
    assert against.saved_s(("computation",)) == pytest.approx(gained[0], abs=1e-9 * len(plan.operators))
    assert against.saved_s(SENT) == pytest.approx(gained[1], abs=1e-12)
    assert against.saved_s(("optimizer",)) == pytest.approx(against.optimizer_s - (plan.optimizer_s or 0.0), abs=1e-15)


@pytest.mark.parametrize("model", some_thorough(["gpt2", "llama", "vit"], ["llama", "vit"]))
def test_the_expert_is_the_best_baseline_of_a_contest(model: str) -> None:
    example, contest = EXAMPLES[model], compare(*EXAMPLES[model](), **MESH)
    plan = autoshard.plan(*example(), **MESH, against="experts", cache=False)
    assert plan.against is not None and contest.best is not None and contest.best.plan is not None
    best = contest.best.plan
    assert plan.against.expert == contest.best.name
    assert plan.against.step_s == pytest.approx(best.step_s, rel=1e-12)
    assert best.memory is not None and plan.against.peak_bytes == best.memory.peak.size_bytes
    check(plan)
    alone = autoshard.plan(*example(), **MESH, cache=False)
    assert replace(plan, against=None) == alone  # it is held against them, and no other plan


def test_experts_are_held_to_the_constraints_of_the_plan() -> None:
    plan = planned(constraints=["family dp=fsdp", "family tp=tp"])
    assert plan.against is not None and plan.against.expert == "fsdp+tp"
    assert not plan.against.parts  # it is that plan itself
    check(plan)


def test_experts_compute_again_what_they_must_where_memory_is_short() -> None:
    options = {"mesh": "dp=2", "hardware": "cpu-gloo", "optimizer": "sgd", "cache": False, "time_limit_s": 5}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not proven
        plan = autoshard.plan(*plain(), **options, memory=PLAIN_BUDGET, against="experts")
    assert plan.against is not None and plan.against.expert.endswith("/full")
    assert plan.against.peak_bytes <= PLAIN_BUDGET and plan.solver.cost_ns <= round(plan.against.step_s * 1e9) + 1
    check(plan)


BLOCKS = {"mesh": "dp=2", "hardware": "cpu-gloo", "cache": False}


def test_a_plan_that_an_expert_beats_gives_way() -> None:
    profile = load_profile("cpu-gloo")
    planner = Planner.of_model(*blocks(), None, "dp=2", profile, limit=memory_limit("adamw", None, None, profile))
    best = autoshard.plan(*blocks(), **BLOCKS)
    found = against_experts(planner, replace(best, solver=best.solver.having(10**15, best.solver.bound_ns)))
    assert found.against is not None and not found.against.parts
    assert math.isclose(found.solver.cost_ns, found.against.step_s * 1e9, rel_tol=1e-6)
    assert found.solver.bound_ns == best.solver.bound_ns


def test_where_no_scheme_has_a_plan_a_warning_says_so() -> None:
    constraints = ["only x dp:R", "forbid all_reduce over dp of tensors", "forbid reduce_scatter over dp of tensors"]
    with pytest.warns(UserWarning, match="autoshard compare"):
        plan = autoshard.plan(*blocks(), **BLOCKS, against="experts", constraints=constraints)
    assert plan.against is None


def test_the_plan_of_a_mesh_that_is_found_is_held_against_experts_on_it() -> None:
    example = blocks()
    plan = autoshard.plan(*example, mesh="auto", devices=2, hardware="cpu-gloo", against="experts", cache=False)
    again = autoshard.plan(*example, mesh=plan.mesh, hardware="cpu-gloo", against="experts", cache=False)
    assert plan.against is not None and again.against is not None
    assert (plan.against.expert, plan.against.step_s) == (again.against.expert, again.against.step_s)


def test_only_experts_can_be_held_against() -> None:
    with pytest.raises(ValueError, match="choose 'experts'"):
        planned(against="megatron")


def test_a_kept_plan_is_another_one_with_experts(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path))
    without, held = (planned(cache=True, against=against) for against in (None, "experts"))
    assert without.against is None and held.against is not None
    assert planned(cache=True) == held and planned(cache=True, against=None) == without
