"""What the backward computes again runs as planned, and trains as one process does that keeps everything."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import autoshard
from autoshard.planning import timeline_of
from autoshard.plans import ShardingPlan
from cost_models import optimizer_policy

from . import cases
from .harness import run_ranks
from .operators import executed_operators, planned_operators
from .parity import Differences, both, check_parity
from .test_parity import LIMIT


def _run(case: str, text: str) -> tuple[Differences, Counter[str]]:
    """How far this rank is from one process, and which operators it runs in a step."""
    plan, parallel, reference, mesh = both(case, text)
    seen = check_parity(case, text, mesh, pair=(parallel, reference))
    return seen, executed_operators(case, plan, parallel)


def _trains_as_planned(case: str, plan: ShardingPlan) -> None:
    for seen, executed in run_ranks(plan.mesh.size, _run, case, autoshard.dump_plan(plan), timeout_s=120.0):
        assert seen.within(LIMIT), seen
        assert executed == planned_operators(plan)


def test_checkpointed_layers_run_as_planned_and_train_as_one_process_does():
    case = "llama"
    kept = cases.sharded_plan(case, "dp=2,tp=2")
    plan = cases.sharded_plan(case, "dp=2,tp=2", constraints=("checkpoint layers.*",))
    # in a model this small what travels together is most of the peak, so the memory is compared without
    graph, adamw = cases.graph(case), optimizer_policy("adamw")
    peaks = [timeline_of(graph, replace(each, bucket_bytes=0), adamw).peak for each in (plan, kept)]
    assert peaks[0].size_bytes < peaks[1].size_bytes
    assert planned_operators(plan).total() > planned_operators(kept).total()
    _trains_as_planned(case, plan)


def test_what_the_planner_chooses_to_compute_again_runs_as_planned_and_fits():
    def planned(memory: int | None) -> ShardingPlan:
        model, args = cases.make("blocks")
        hardware = cases.slow_machine()
        options = {"memory": memory, "checkpointing": "free", "bucket": 0}
        return autoshard.plan(model, args, mesh="dp=2", hardware=hardware, **options)

    kept = planned(None)
    assert kept.memory is not None and not kept.recomputed
    budget = int(0.85 * kept.memory.peak.size_bytes)
    plan = planned(budget)
    assert plan.memory is not None and plan.memory.peak.size_bytes <= budget
    assert plan.recomputed
    _trains_as_planned("blocks", plan)


@pytest.mark.parametrize(
    ("case", "axes"),
    [
        pytest.param("llama odd", "dp=2,tp=2", marks=pytest.mark.thorough),
        pytest.param("gpt2 small", "tp=2", marks=pytest.mark.thorough),
        ("assorted odd", "tp=3"),
    ],
)
def test_anything_may_be_computed_again_under_any_strategies(case: str, axes: str):
    plan = cases.random_plan(case, axes, seed=11, again=0.6)
    assert plan.recomputed
    _trains_as_planned(case, plan)


def test_the_marks_of_the_model_count_unless_they_are_not_to():
    model, args = cases.make("checkpointed")
    as_marked = autoshard.plan(model, args, mesh="dp=2,tp=2", hardware="cpu-gloo")
    none = autoshard.plan(model, args, mesh="dp=2,tp=2", hardware="cpu-gloo", checkpointing="none")
    assert as_marked.recomputed and not none.recomputed
    assert as_marked.fingerprint == none.fingerprint
    for plan in (as_marked, none):
        _trains_as_planned("checkpointed", plan)
