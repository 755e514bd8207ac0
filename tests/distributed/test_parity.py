"""Training on real gloo processes gives what one process gives, with exactly the collectives of the plan."""

from __future__ import annotations

import pytest

import autoshard
from autoshard.plans import ShardingPlan
from autoshard.plans.schedule import schedule

from ..thorough import some_thorough
from . import cases
from .harness import run_ranks
from .parity import Differences, are_in_one_order, check_parity, device_mesh_of, planned_collectives

LIMIT = 1e-4  # of the largest relative difference of one tensor; 2.2e-5 is the largest seen


def _trained(case: str, plan: ShardingPlan) -> Differences:
    text = autoshard.dump_plan(plan)
    results = run_ranks(plan.mesh.size, check_parity, case, text, timeout_s=120.0)
    worst = Differences(*(max(getattr(r, kind) for r in results) for kind in ("loss", "gradient", "parameter")))
    print(f"{case} on {plan.mesh}: {worst}")
    assert worst.within(LIMIT), worst
    assert are_in_one_order(results)
    return worst


def _check_all(case: str, texts: list[str]) -> list[Differences]:
    mesh = device_mesh_of(autoshard.parse_plan(texts[0]))
    return [check_parity(case, text, mesh, steps=2) for text in texts]


def _axes_that_communicate(plan: ShardingPlan) -> set[str]:
    return {axis for _, axis, _ in planned_collectives(plan)}


@pytest.mark.parametrize(
    ("case", "axes"),
    [
        *(("mlp", axes) for axes in ("tp=2", "dp=2,tp=4")),
        pytest.param("mlp", "dp=4", marks=pytest.mark.thorough),
        pytest.param("mlp", "dp=2,tp=2", marks=pytest.mark.thorough),
        ("llama", "dp=2,tp=2"),
        pytest.param("llama of 1", "dp=2,tp=4", marks=pytest.mark.thorough),
        pytest.param("gpt2", "dp=4", marks=pytest.mark.thorough),
        pytest.param("gpt2", "dp=2,tp=4", marks=pytest.mark.thorough),
    ],
)
def test_inputs_over_dp_heads_and_columns_over_tp(case: str, axes: str):
    plan = cases.sharded_plan(case, axes)
    assert _axes_that_communicate(plan) == set(plan.mesh.axes)
    _trained(case, plan)


@pytest.mark.parametrize(
    ("case", "axes"),
    [
        ("mlp odd", "dp=2,tp=2"),
        ("mlp odd", "dp=2,tp=4"),
        pytest.param("llama odd", "dp=2,tp=2", marks=pytest.mark.thorough),
        pytest.param("gpt2 odd", "dp=2,tp=4", marks=pytest.mark.thorough),
    ],
)
def test_sizes_that_the_axes_do_not_divide(case: str, axes: str):
    """Batch 7, 6 heads with 3 key-value heads, width 90, vocabulary 101, sequence 13; 4 ranks cannot share 6 heads."""
    heads = "" if axes.endswith("tp=2") else "attention/attention" if "llama" in case else "attn/attention"
    plan = cases.sharded_plan(case, axes, without=heads)
    assert _axes_that_communicate(plan) == set(plan.mesh.axes)
    _trained(case, plan)


@pytest.mark.parametrize(
    ("case", "hardware"),
    [
        ("mlp", "cpu-gloo"),
        pytest.param("llama small", "dgx-h100", marks=pytest.mark.thorough),
        pytest.param("gpt2", "cpu-gloo", marks=pytest.mark.thorough),
    ],
)
def test_plain_optimum(case: str, hardware: str):
    _trained(case, cases.optimum(case, "dp=2,tp=2", hardware))


@pytest.mark.parametrize("case", ["mlp", "llama small", "gpt2"])
def test_one_rank(case: str):
    plan = cases.optimum(case, "dp=1", "cpu-gloo")
    assert not planned_collectives(plan)
    _trained(case, plan)


@pytest.mark.parametrize(
    ("case", "axes", "seeds"),
    [
        ("mlp odd", "dp=2,tp=2", tuple(range(4))),
        pytest.param("mlp odd", "dp=2,tp=2", tuple(range(4, 9)), marks=pytest.mark.thorough),
        pytest.param("llama small", "tp=3", (0, 1, 2), marks=pytest.mark.thorough),
        pytest.param("gpt2 small", "tp=2", (0, 1, 2), marks=pytest.mark.thorough),
        ("assorted", "dp=2,tp=2", (0,)),
        pytest.param("assorted", "dp=2,tp=2", (0, 2), marks=pytest.mark.thorough),
        pytest.param("assorted odd", "tp=3", (0, 1, 2), marks=pytest.mark.thorough),
    ],
)
def test_plans_drawn_at_random(case: str, axes: str, seeds: tuple[int, ...]):
    """Not only good plans: any strategies that can be joined up give the right numbers, with what they planned.

    The remainder of a seed by 3 says how much travels together (`cases.BUCKETS`).
    """
    plans = [cases.random_plan(case, axes, seed) for seed in seeds]
    assert any(bucket.is_early for plan in plans for bucket in schedule(plan).buckets), "no activation sets out early"
    results = run_ranks(plans[0].mesh.size, _check_all, case, [autoshard.dump_plan(p) for p in plans], timeout_s=120.0)
    assert all(seen.within(LIMIT) for result in results for seen in result), results[0]
    assert all(are_in_one_order(ranks) for ranks in zip(*results))
    print(f"{case} on {axes}: {[(seen.loss, seen.gradient, seen.parameter) for seen in results[0]]}")


@pytest.mark.parametrize(
    ("axes", "scheme"), some_thorough([("tp=4", "tp"), ("dp=2,tp=2", "fsdp+tp")], [("tp=4", "tp")])
)
def test_sums_of_gradients_that_set_out_early(axes: str, scheme: str):
    """Those for the input of a product travel while the gradient for its weight is made."""
    plan = cases.baseline_plan("gpt2", axes, scheme)
    early = [bucket for bucket in schedule(plan).buckets if bucket.is_early and not bucket.is_deferred]
    assert {(bucket.phase, bucket.travels[0].kind) for bucket in early} == {("backward", "all_reduce")}
    _trained("gpt2", plan)


def test_activations_cut_along_the_sequence():
    plan = cases.baseline_plan("gpt2", "tp=4", "sp")
    assert {kind for kind, _, _ in planned_collectives(plan)} >= {"all_gather", "reduce_scatter"}
    _trained("gpt2", plan)
