"""Laws of the schedule: it moves what the plan moves, in time, in bounded buckets, and is a function of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given

from autoshard.layout import parse_layout
from autoshard.plans import (
    PHASES,
    Collective,
    Execution,
    Phase,
    Redistribution,
    ShardingPlan,
    TensorEntry,
    read_plan,
)
from autoshard.plans.schedule import EARLIEST, END, MOST_EARLY, Bucket, schedule, sent
from autoshard.plans.simulation import simulate

from .synthetic import MESH, plans, transformer_plan

GOLDEN = Path(__file__).with_name("golden")
SIZES = (1, 100_000, 25 << 20, 1 << 40)
PLANS = {
    "transformer": transformer_plan(4),
    "llama3_8b": read_plan(GOLDEN / "llama3_8b.yaml"),
    "llama3_8b-tight": read_plan(GOLDEN / "llama3_8b-tight.yaml"),
}


def order(plan: ShardingPlan, phase: Phase) -> dict[str, int]:
    names = [entry.name for entry in plan.execution if entry.phase == phase]
    return {name: k for k, name in enumerate((*names, END))}


def size(bucket: Bucket) -> int:
    return sum(max(c.size_bytes for c in member.collectives) for member in bucket.members)


def check(plan: ShardingPlan) -> Sequence[Bucket]:
    """Asserts every law."""
    buckets = schedule(plan).buckets
    moved: Counter[tuple[str, str, str]] = Counter()
    for phase, collective in plan.collectives():
        moved[phase, collective.kind, collective.axis] += collective.size_bytes
    travelling: Counter[tuple[str, str, str]] = Counter()
    for each in sent(plan):
        travelling[each.phase, each.kind, each.axis] += each.size_bytes
    assert +travelling == +moved, "other bytes travel than are moved"
    members = [member for bucket in buckets for member in bucket.members]
    assert len(members) == len(set(members)) and set(members) <= set(plan.redistributions)
    parameters = {entry.name for entry in plan.parameters}
    for bucket in buckets:
        places = order(plan, bucket.phase)
        assert len(bucket.members) == 1 or size(bucket) <= plan.bucket_bytes
        times = [places[place] for travel in bucket.travels for place in (travel.sets_out, travel.arrives)]
        assert times == sorted(times), "a collective is waited for before it is issued"
        for member in bucket.members:
            assert len(member.collectives) == len(bucket.travels)
            if member.tensor in parameters or not parameters.intersection(member.consumers):
                assert times[-1] <= min(places.get(name, places[END]) for name in member.consumers), "read too early"
            if member.tensor not in parameters:
                maker = member.tensor if member.tensor in places else member.tensor.rpartition(":")[0]
                assert places[maker] < times[0], "sets out before it is made"
    for phase in PHASES:
        turns = schedule(plan).turns(phase)
        done = [(t.bucket, t.travel, t.what) for place in order(plan, phase) for t in turns.get(place, ())]
        for k, bucket in enumerate(buckets):
            mine = [(travel, what) for number, travel, what in done if number == k]
            expected = [(travel, what) for travel in range(len(bucket.travels)) for what in ("issue", "wait")]
            assert mine == (expected if bucket.phase == phase else [])
    return buckets


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("name", PLANS)
def test_real_plans_keep_the_laws(name: str, size_bytes: int, ahead: bool) -> None:
    found = check(replace(PLANS[name], bucket_bytes=size_bytes, gathers_ahead=ahead))
    assert found, "nothing travels, so nothing was checked"
    several = [bucket for bucket in found if len(bucket.members) > 1]
    assert size_bytes < SIZES[2] or several, "nothing travels together"
    assert size_bytes > 1 or not several


@given(plans())
def test_any_plan_keeps_the_laws(plan: ShardingPlan) -> None:
    check(plan)


def test_without_buckets_and_in_several_micro_batches_everything_travels_alone() -> None:
    plan = replace(PLANS["llama3_8b"], bucket_bytes=25 << 20)
    for alone in (replace(plan, bucket_bytes=0), replace(plan, micro_batches=2)):
        assert not schedule(alone).buckets
        assert len(list(sent(alone))) == sum(1 for _ in alone.collectives())


def test_gathers_set_out_a_window_ahead() -> None:
    """The second window of a phase sets out where the first is read, and so on."""
    plan = replace(PLANS["llama3_8b"], bucket_bytes=1 << 40)
    parameters = {entry.name for entry in plan.parameters}
    gathers = [
        bucket
        for bucket in schedule(plan).buckets
        if bucket.phase == "forward" and bucket.members[0].tensor in parameters
    ]
    windows = list(dict.fromkeys(bucket.travels[0].sets_out for bucket in gathers))
    places = order(plan, "forward")
    readers = sorted({places[travel.arrives] for bucket in gathers for travel in bucket.travels})
    assert len(windows) > 30, "every layer is a window"
    for bucket in gathers:
        assert places[bucket.travels[0].sets_out] in {0, *readers}
        assert places[bucket.travels[0].sets_out] < places[bucket.travels[-1].arrives]


def test_what_is_not_gathered_ahead_sets_out_where_it_is_read() -> None:
    plan = replace(PLANS["llama3_8b-tight"], bucket_bytes=1 << 20)
    parameters = {entry.name for entry in plan.parameters}

    def gathers(ahead: bool) -> list[Bucket]:
        buckets = schedule(replace(plan, gathers_ahead=ahead)).buckets
        return [bucket for bucket in buckets if bucket.members[0].tensor in parameters]

    assert any(travel.sets_out != travel.arrives for bucket in gathers(True) for travel in bucket.travels)
    assert all(travel.sets_out == travel.arrives for bucket in gathers(False) for travel in bucket.travels)
    assert {bucket.members for bucket in gathers(True)} == {bucket.members for bucket in gathers(False)}


def test_each_step_of_a_gather_over_two_axes_has_a_window_to_itself() -> None:
    cut, half, whole = (parse_layout(text, MESH) for text in ("dp:S(0) tp:S(0)", "dp:S(0)", ""))
    names = [f"layers.{k}/mm" for k in range(4)]
    steps = (Collective("all_gather", "tp", 128, 1e-6), Collective("all_gather", "dp", 256, 1e-6))
    plan = replace(
        transformer_plan(1),
        parameters=tuple(TensorEntry(f"layers.{k}.weight", (8, 8), "float32", cut) for k in range(4)),
        redistributions=tuple(
            Redistribution(f"layers.{k}.weight", "forward", (cut, half, whole), steps, consumers=(name,))
            for k, name in enumerate(names)
        ),
        execution=tuple(Execution(name, "forward", 1) for name in names),
        bucket_bytes=1 << 20,
    )
    travels = [[(t.axis, t.sets_out, t.arrives) for t in bucket.travels] for bucket in schedule(plan).buckets]
    ways = {found[-1][-1]: found for found in travels}
    assert ways[names[0]] == [("tp", names[0], names[0]), ("dp", names[0], names[0])]
    assert ways[names[1]] == [("tp", names[0], names[0]), ("dp", names[0], names[1])]
    assert ways[names[2]] == [("tp", names[0], names[1]), ("dp", names[1], names[2])]
    assert ways[names[3]] == [("tp", names[1], names[2]), ("dp", names[2], names[3])]


@pytest.mark.parametrize("size_bytes", SIZES)
@pytest.mark.parametrize("name", PLANS)
def test_gradients_on_their_way_are_two_buckets_at_most(name: str, size_bytes: int) -> None:
    """Where a bucket sets out, all before it but those that have room beside it have arrived; where there is room it
    travels beside the one before.
    """
    plan = replace(PLANS[name], bucket_bytes=size_bytes)
    places, parameters = order(plan, "backward"), {entry.name for entry in plan.parameters}
    buckets = [b for b in schedule(plan).buckets if b.members[0].consumers[0] in parameters and len(b.travels) == 1]
    buckets = [b for b in buckets if b.phase == "backward"]
    assert buckets, "nothing is reduced, so nothing was checked"
    begun = sorted({places[bucket.travels[0].sets_out] for bucket in buckets})
    for moment in begun:
        flying = [b for b in buckets if places[b.travels[0].sets_out] <= moment < places[b.travels[0].arrives]]
        setting_out = [b for b in flying if places[b.travels[0].sets_out] == moment]
        assert sum(map(size, flying)) <= max(2 * size_bytes, sum(map(size, setting_out)))
    alone = replace(plan, gathers_ahead=False)
    lean = [b for b in schedule(alone).buckets if b.members in {bucket.members for bucket in buckets}]
    for a, b in pairwise(lean):
        assert places[a.travels[0].arrives] <= places[b.travels[0].sets_out], "a lean plan has one on its way"
    if name == "llama3_8b" and size_bytes == SIZES[2]:
        assert any(places[a.travels[0].arrives] > places[b.travels[0].sets_out] for a, b in pairwise(buckets))


def early(plan: ShardingPlan) -> list[Bucket]:
    """The activations, and gradients of activations, that set out before they are read."""
    parameters, found = {entry.name for entry in plan.parameters}, []
    for bucket in schedule(plan).buckets:
        of_parameters = {name for each in bucket.members for name in (each.tensor, *each.consumers)} & parameters
        assert bucket.is_early == (not of_parameters)
        found += [bucket] * (bucket.is_early and not bucket.is_deferred)
    return found


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_8b-tight"])
def test_what_is_deferred_is_on_its_way_until_the_backward_is_over(name: str) -> None:
    plan = replace(PLANS[name], bucket_bytes=SIZES[2])
    assert plan.deferred
    (bucket,) = (bucket for bucket in schedule(plan).buckets if bucket.is_deferred)
    places = order(plan, "forward")
    assert set(bucket.members[0].consumers) <= set(plan.deferred)
    assert places[bucket.travels[0].sets_out] == 1 + places[bucket.members[0].tensor]
    found = simulate(plan)
    (sent,) = (span for span in found.spans if span.what == bucket)
    backward = [span for span in found.spans if isinstance(span.what, Execution) and span.phase == "backward"]
    first = next(span for span in backward if span.what.name not in plan.deferred)
    late = [span for span in backward if span.what.name in plan.deferred]
    assert [span.what.name for span in late] == [name for name in plan.deferred if name in places]
    assert first.start_ns < sent.end_ns, "the backward waits for it"
    assert min(span.start_ns for span in late) >= max(span.end_ns for span in backward if span not in late)
    waiting = simulate(replace(plan, deferred=())).step_ns
    assert found.step_ns < waiting
    for other in (replace(plan, gathers_ahead=False), replace(plan, bucket_bytes=0)):
        assert not any(each.is_deferred for each in schedule(other).buckets)


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_8b-tight"])
def test_activations_are_early_where_operators_take_time_before_their_reader(name: str) -> None:
    """Each alone, not sooner than they have to, few at a time; a lean plan has none."""
    plan = replace(PLANS[name], bucket_bytes=SIZES[2])
    found = early(plan)
    assert found, "none is early, so nothing was checked"
    for phase in PHASES:
        places = order(plan, phase)
        took = [entry.predicted_ns for entry in plan.execution if entry.phase == phase]
        flights = []
        for bucket in (bucket for bucket in found if bucket.phase == phase):
            (member,) = bucket.members
            assert not (member.shared or member.kept)
            start, end = places[bucket.travels[0].sets_out], places[bucket.travels[-1].arrives]
            assert end == min(places[reader] for reader in member.consumers)
            assert sum(took[start:end]) > 0, "nothing hides it"
            assert sum(took[start + 1 : end]) <= EARLIEST * member.predicted_s * 1e9, "it could set out later"
            flights.append((start, end))
        for moment, _ in flights:
            assert sum(start <= moment < end for start, end in flights) <= MOST_EARLY
    assert not early(replace(plan, gathers_ahead=False))
    assert not early(replace(plan, bucket_bytes=0))


def test_of_several_collectives_the_longest_is_beside_operators() -> None:
    """The two sums of a gated feed-forward network: one travels while the other is made, which is waited for."""
    made, half, whole = (parse_layout(text, MESH) for text in ("dp:P(sum) tp:P(sum)", "tp:P(sum)", ""))
    names = [f"layers.0.{name}" for name in ("w1/mm", "w1/view", "w3/mm", "act/mul", "w2/mm")]
    for times, travels in (
        ((3e-6, 2e-6), [("dp", names[2], names[3]), ("tp", names[3], names[3])]),
        ((2e-6, 3e-6), [("dp", names[2], names[2]), ("tp", names[2], names[3])]),
    ):
        steps = tuple(Collective("all_reduce", axis, 128, time) for axis, time in zip(("dp", "tp"), times))
        plan = replace(
            transformer_plan(1),
            redistributions=tuple(
                Redistribution(name, "forward", (made, half, whole), steps, consumers=(names[3],))
                for name in (names[0], names[2])
            ),
            execution=tuple(Execution(name, "forward", 10_000 * ("view" not in name)) for name in names),
            bucket_bytes=1,
        )
        (bucket,) = early(plan)
        assert [(travel.axis, travel.sets_out, travel.arrives) for travel in bucket.travels] == travels
        reads = replace(plan.redistributions[0], consumers=(names[1], names[3]))
        assert not early(replace(plan, redistributions=(reads,))), "the view reads it at once"


def test_where_a_gradient_is_not_wanted_its_bucket_goes_without_it() -> None:
    plan = replace(PLANS["llama3_8b"], bucket_bytes=1 << 40)
    reduced = [b for b in schedule(plan).buckets if b.members[0].consumers[0] in {e.name for e in plan.parameters}]
    name = reduced[0].members[0].consumers[0]
    fewer = schedule(plan, unwanted=[name])
    assert sum(len(b.members) for b in fewer.buckets) == sum(len(b.members) for b in schedule(plan).buckets) - 1
    assert all(name not in member.consumers for bucket in fewer.buckets for member in bucket.members)
