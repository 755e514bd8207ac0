"""The predicted step on its streams: what it may not be shorter or longer than, and who waits for whom."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

from autoshard.plans import Collective, Execution, Redistribution, ShardingPlan, TensorEntry
from autoshard.plans.plan import PHASES
from autoshard.plans.schedule import END, Bucket, schedule
from autoshard.plans.simulation import COMPUTE, Span, simulate

from ..distributed import cases
from .synthetic import layout, transformer_plan

PLANS = [("mlp", 0), ("mlp", 1), ("gpt2", 2), ("llama", 3), ("moe", 4)]
random_plans = pytest.mark.parametrize(("case", "seed"), [*PLANS, pytest.param("llama", 6, marks=pytest.mark.thorough)])


@cache
def random_plan(case: str, seed: int) -> ShardingPlan:
    return cases.random_plan(case, "dp=2,tp=2", seed)


def lanes(spans: tuple[Span, ...]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.lane].append(span)
    return found


def two_layers(bucket_bytes: int) -> ShardingPlan:
    """Two layers of 10 us each, which gather their weights in 6 us."""
    whole, cut = layout(""), layout("dp:S(0)")
    names = ["layers.0/mm", "layers.1/mm"]
    weights = [f"layers.{k}.weight" for k in range(2)]
    moved = tuple(
        Redistribution(weight, "forward", (cut, whole), (Collective("all_gather", "dp", 256, 6e-6),), consumers=(name,))
        for weight, name in zip(weights, names)
    )
    return replace(
        transformer_plan(1),
        parameters=tuple(TensorEntry(weight, (8, 8), "float32", cut) for weight in weights),
        redistributions=moved,
        execution=tuple(Execution(name, "forward", 10_000) for name in names),
        bucket_bytes=bucket_bytes,
        optimizer_s=None,
    )


def test_the_second_layers_weights_travel_while_the_first_computes() -> None:
    assert simulate(two_layers(0)).step_ns == 32_000
    found = simulate(two_layers(1024))
    assert [(span.lane, span.start_ns, span.end_ns) for span in found.spans] == [
        ("dp", 0, 6_000),
        ("dp", 6_000, 12_000),
        (COMPUTE, 6_000, 16_000),
        (COMPUTE, 16_000, 26_000),
    ]
    assert (found.step_ns, found.hidden_ns) == (26_000, 6_000)


@random_plans
def test_the_step_is_no_shorter_than_any_lane_and_no_longer_than_all_together(case: str, seed: int) -> None:
    plan = random_plan(case, seed)
    found = simulate(plan)
    sums = {lane: sum(span.took_ns for span in spans) for lane, spans in lanes(found.spans).items()}
    assert max(sums.values()) <= found.step_ns <= sum(sums.values())
    entries = len(plan.redistributions) + len(plan.operators)
    assert sums[COMPUTE] == pytest.approx(1e9 * (plan.compute_s + (plan.optimizer_s or 0.0)), abs=entries)
    for axis in plan.links:
        predicted = math.fsum(each.predicted_s for _, each in plan.collectives() if each.axis == axis)
        assert sums.get(axis, 0) == pytest.approx(1e9 * predicted, abs=entries)


def test_some_of_these_plans_hide_something() -> None:
    assert sum(simulate(random_plan(*each)).hidden_ns > 0 for each in PLANS) > 1


@random_plans
def test_without_buckets_one_thing_runs_at_a_time(case: str, seed: int) -> None:
    found = simulate(replace(random_plan(case, seed), bucket_bytes=0))
    assert found.hidden_ns == 0
    assert all(before.end_ns == after.start_ns for before, after in pairwise(found.spans))


@random_plans
def test_a_lane_does_one_thing_at_a_time_and_operators_wait_for_what_they_read(case: str, seed: int) -> None:
    plan = random_plan(case, seed)
    found = simulate(plan)
    for spans in lanes(found.spans).values():
        assert all(before.end_ns <= after.start_ns for before, after in pairwise(spans))
    starts = {(span.phase, span.what.name): span.start_ns for span in found.spans if isinstance(span.what, Execution)}
    order = {phase: [entry.name for entry in plan.execution if entry.phase == phase] for phase in PHASES}
    checked = 0
    for span in found.spans:
        if not isinstance(span.what, Bucket):
            continue
        travel = span.what.travels[span.step]
        names = order[span.what.phase]
        if travel.sets_out != END:
            before = names[: names.index(travel.sets_out)]
            ends = [starts[span.what.phase, name] for name in before]
            assert span.start_ns >= max(ends, default=0)
        if travel.arrives != END:
            assert span.end_ns <= starts[span.what.phase, travel.arrives]
        checked += 1
    assert checked == sum(len(bucket.travels) for bucket in schedule(plan).buckets)
