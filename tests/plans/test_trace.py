"""The predicted timeline: trace events that are valid, ordered, and add up to the plan's times."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from autoshard.errors import PlanFileError
from autoshard.plans import ShardingPlan, read_plan
from autoshard.plans.views.trace import COMPUTE, FIRST_LINK, LAYERS, trace_json

from .synthetic import sharded_plan, transformer_plan
from .write_golden import FOLDER

PLANS = {
    "transformer": transformer_plan(4),
    "sharded": sharded_plan(4),
    "llama": read_plan(FOLDER / "llama3_8b-tight.yaml"),
}
plans = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def spans(plan: ShardingPlan) -> list[dict[str, Any]]:
    events = json.loads(json.dumps(trace_json(plan)))["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


@plans
def test_every_event_has_what_the_format_asks_for(plan: ShardingPlan) -> None:
    for event in trace_json(plan)["traceEvents"]:
        assert event["ph"] in ("X", "M") and event["pid"] == 1 and isinstance(event["name"], str)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0


@plans
def test_there_is_a_named_track_for_each_stream(plan: ShardingPlan) -> None:
    events = trace_json(plan)["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    axes = {FIRST_LINK + i: f"communication over {axis}" for i, axis in enumerate(plan.links)}
    assert names == {LAYERS: "layers", COMPUTE: "compute", **axes}
    assert {event["tid"] for event in events if "tid" in event} == set(names)


@plans
def test_the_tracks_add_up_to_the_plans_times(plan: ShardingPlan) -> None:
    seconds: dict[int, float] = defaultdict(float)
    for event in spans(plan):
        seconds[event["tid"]] += event["dur"] / 1e6
    half_a_ns_each = 0.5e-9 * (len(plan.operators) + sum(1 for _ in plan.collectives())) + 1e-12
    assert plan.optimizer_s
    assert seconds[COMPUTE] == pytest.approx(plan.compute_s + plan.optimizer_s, abs=half_a_ns_each)
    for i, axis in enumerate(plan.links):
        predicted = sum(c.predicted_s for _, c in plan.collectives() if c.axis == axis)
        assert seconds[FIRST_LINK + i] == pytest.approx(predicted, abs=half_a_ns_each)


@plans
def test_nothing_overlaps_on_a_track_and_the_forward_comes_first(plan: ShardingPlan) -> None:
    work = [event for event in spans(plan) if event["tid"] != LAYERS]
    for track in {event["tid"] for event in work}:
        for before, after in pairwise(event for event in work if event["tid"] == track):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-3
    for before, after in pairwise(work):
        assert (before["cat"], after["cat"]) != ("backward", "forward")


@plans
def test_layers_follow_each_other(plan: ShardingPlan) -> None:
    layers = [event for event in spans(plan) if event["tid"] == LAYERS]
    assert layers
    for before, after in pairwise(layers):
        assert after["ts"] >= before["ts"] + before["dur"] - 1e-3


@plans
def test_a_tensor_moves_after_it_is_made_and_before_it_is_wanted(plan: ShardingPlan) -> None:
    start = {(e["cat"], e["name"]): e["ts"] for e in spans(plan) if e["tid"] == COMPUTE}
    moves = [event for event in spans(plan) if event["tid"] >= FIRST_LINK]
    assert moves
    for move in moves:
        maker = start.get((move["cat"], move["args"]["tensor"]))
        assert maker is None or maker < move["ts"]
        for name in move["args"]["for"].split(", "):
            assert move["ts"] <= start.get((move["cat"], name), float("inf"))


@plans
def test_what_the_trace_does_not_show_is_said(plan: ShardingPlan) -> None:
    trace = trace_json(plan)
    end = max(event["ts"] + event["dur"] for event in spans(plan)) / 1e6
    other = trace["otherData"]
    hidden_s = other["beside_something_else_s"] + other["local_copies_not_shown_s"]
    assert end + hidden_s == pytest.approx(plan.step_s, rel=1e-5)


def test_a_plan_that_knows_no_order_gives_no_timeline() -> None:
    with pytest.raises(PlanFileError, match="in which order its operators run; make it again"):
        trace_json(replace(transformer_plan(2), execution=()))


def test_an_empty_plan_gives_an_empty_timeline() -> None:
    plan = replace(transformer_plan(1), operators=(), redistributions=(), execution=(), optimizer_s=None)
    assert spans(plan) == []


def test_the_optimizers_step_comes_last_and_is_named() -> None:
    last = [event for event in spans(transformer_plan(2)) if event["tid"] != LAYERS][-1]
    assert (last["name"], last["cat"], last["args"]) == ("optimizer step", "optimizer", {"optimizer": "adamw"})
    assert last["dur"] == pytest.approx(42.5)
