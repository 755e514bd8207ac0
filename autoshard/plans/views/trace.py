"""The predicted timeline of one rank as trace events, for https://ui.perfetto.dev and chrome://tracing.

One track for computation, one for what is sent over each mesh axis (and over several at once), one that names the
layers: the step as :mod:`autoshard.plans.simulation` has it. What the schedule sends ahead is drawn beside the
operators that run meanwhile; of several micro-batches one is shown, and ``runs`` says how often a step does a thing.

Format: the Trace Event Format of Chromium (complete events, times in microseconds),
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ...errors import PlanFileError
from ...layout import format_layout
from ...micro_batches import operator_runs
from ..plan import Redistribution, ShardingPlan
from ..schedule import Bucket
from ..simulation import COMPUTE as LANE_OF_COMPUTE
from ..simulation import Simulation, simulate
from ..text.name_patterns import split_name

Event = dict[str, Any]
LAYERS, COMPUTE, FIRST_LINK = 1, 2, 3
"""Track numbers."""


def trace_json(plan: ShardingPlan) -> dict[str, Any]:
    """The timeline as the JSON object of a trace file.

    Raises:
        PlanFileError: the plan does not know the order of execution, as one read from format 1.
    """
    if plan.operators and not plan.execution:
        raise PlanFileError("the plan does not say in which order its operators run; make it again to get a trace")
    found = simulate(plan)
    events = list(_events(plan, found))
    shown_s = sum(event["dur"] * event["args"].get("runs", 1) for event in events) / 1e6
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "model": plan.model,
            "mesh": str(plan.mesh),
            "hardware": plan.hardware,
            "note": "predicted; one rank; nothing slows down what runs beside it"
            + f"; one of {plan.micro_batches} micro-batches" * (plan.micro_batches > 1),
            "predicted_step_s": plan.step_s,
            "beside_something_else_s": found.hidden_ns / 1e9,
            "local_copies_not_shown_s": max(0.0, plan.step_s - shown_s),
        },
        "traceEvents": [*_tracks(plan), *_layers(events), *events],
    }


def _tracks(plan: ShardingPlan) -> Iterator[Event]:
    names = ["layers", "compute", *(f"communication over {axis}" for axis in plan.links)]
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"predicted step of {plan.model}"}}
    for track, name in enumerate(names, start=LAYERS):
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _events(plan: ShardingPlan, found: Simulation) -> Iterator[Event]:
    """Operators and collectives as they are issued; operators that take no time are left out."""
    strategies = {(entry.phase, entry.name): entry for entry in plan.operators}
    tracks = {LANE_OF_COMPUTE: COMPUTE} | {link: track for track, link in enumerate(plan.links, start=FIRST_LINK)}
    for span in found.spans:
        track, what = tracks[span.lane], span.what
        if isinstance(what, Redistribution):
            name = f"{what.collectives[span.step].kind} {what.tensor}"
            said = _moved(plan, what, span.step) | _said(plan, plan.runs(what))
        elif isinstance(what, Bucket):
            more = f" and {len(what.members) - 1} more" if len(what.members) > 1 else ""
            name = f"{what.travels[span.step].kind} {what.members[0].tensor}{more}"
            said = _together(plan, what, span.step)
        elif what is None:
            name, said = "optimizer step", {"optimizer": plan.memory.optimizer} if plan.memory else {}
        elif not span.took_ns:
            continue
        else:
            name = what.name
            layouts = [format_layout(layout, plan.mesh) for layout in strategies[what.phase, name].inputs]
            said = {"inputs": ", ".join(layouts)} | _said(plan, operator_runs(name, plan.micro_batches))
        yield _event(name, span.phase, track, span.start_ns, span.took_ns, said)


def _moved(plan: ShardingPlan, entry: Redistribution, step: int) -> dict[str, Any]:
    return {
        "tensor": entry.tensor,
        "path": " => ".join(format_layout(layout, plan.mesh) for layout in entry.path),
        "bytes": entry.collectives[step].size_bytes,
        "for": ", ".join(entry.consumers),
    }


def _together(plan: ShardingPlan, bucket: Bucket, step: int) -> dict[str, Any]:
    """Of a bucket: what it has, where it is waited for, and for whom."""
    travel = bucket.travels[step]
    wanted = dict.fromkeys(name for member in bucket.members for name in member.consumers)
    return {
        "tensor": ", ".join(member.tensor for member in bucket.members),
        "path": " => ".join(format_layout(layout, plan.mesh) for layout in bucket.members[0].path),
        "bytes": travel.size_bytes,
        "for": ", ".join(wanted),
        "waited for at": travel.arrives,
    }


def _said(plan: ShardingPlan, runs: int) -> dict[str, Any]:
    """How often something runs in a step of several micro-batches."""
    return {"runs": runs} if plan.micro_batches > 1 else {}


def _layers(events: list[Event]) -> Iterator[Event]:
    """A span for each layer or outermost module, from its first operator to its last."""

    def layer(event: Event) -> tuple[str, str]:
        path = event["name"].partition("/")[0]
        components = split_name(path)[0].components
        depth = components.index(None) + 1 if None in components else 1
        return event["cat"], ".".join(path.split(".")[:depth]) or "model"

    for (phase, name), group in groupby((event for event in events if event["tid"] == COMPUTE), key=layer):
        inside = list(group)
        start, end = inside[0]["ts"], inside[-1]["ts"] + inside[-1]["dur"]
        yield {**_event(name, phase, LAYERS, 0, 0, {}), "ts": start, "dur": round(end - start, 3)}


def _event(name: str, phase: str, track: int, start_ns: int, took_ns: int, said: dict[str, Any]) -> Event:
    return {
        "ph": "X",
        "pid": 1,
        "tid": track,
        "name": name,
        "cat": phase,
        "ts": start_ns / 1000,
        "dur": took_ns / 1000,
        "args": said,
    }
