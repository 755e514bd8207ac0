"""The predicted timeline of one rank as trace events, for https://ui.perfetto.dev and chrome://tracing.

One track for computation, one for the communication of each mesh axis, one that names the layers. Nothing overlaps and
nothing travels together: the times are those that the plan was priced with, parts of a bucket's where there is one. A
redistribution runs before the first operator that wants it; a gradient goes to its parameter's layout as soon as it is
made; what leaves the model, at the end of its phase. The optimizer's step comes last, in one piece. Of several
micro-batches one is shown, with what the step does once; ``runs`` says how often a step does a thing.

Format: the Trace Event Format of Chromium (complete events, times in microseconds),
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ...errors import PlanFileError
from ...layout import format_layout
from ...micro_batches import is_summed, operator_runs
from ..plan import Phase, Redistribution, ShardingPlan
from ..text.name_patterns import split_name

Event = dict[str, Any]
LAYERS, COMPUTE, FIRST_AXIS = 1, 2, 3
"""Track numbers."""


def trace_json(plan: ShardingPlan) -> dict[str, Any]:
    """The timeline as the JSON object of a trace file.

    Raises:
        PlanFileError: the plan does not know the order of execution, as one read from format 1.
    """
    if plan.operators and not plan.execution:
        raise PlanFileError("the plan does not say in which order its operators run; make it again to get a trace")
    events = list(_timeline(plan))
    shown_s = sum(event["dur"] * event["args"].get("runs", 1) for event in events) / 1e6
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "model": plan.model,
            "mesh": str(plan.mesh),
            "hardware": plan.hardware,
            "note": "predicted; one rank; collectives do not overlap with computation, nor travel together"
            + f"; one of {plan.micro_batches} micro-batches" * (plan.micro_batches > 1),
            "predicted_step_s": plan.step_s,
            "local_copies_not_shown_s": max(0.0, plan.step_s - shown_s),
        },
        "traceEvents": [*_tracks(plan), *_layers(events), *events],
    }


def _tracks(plan: ShardingPlan) -> Iterator[Event]:
    names = ["layers", "compute", *(f"communication over {axis}" for axis in plan.mesh.axes)]
    yield {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": f"predicted step of {plan.model}"}}
    for track, name in enumerate(names, start=LAYERS):
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": 1, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}


def _timeline(plan: ShardingPlan) -> Iterator[Event]:
    """Operators and collectives in order, one after the other; operators that take no time are left out."""
    ns = 0
    strategies = {(entry.phase, entry.name): entry for entry in plan.operators}
    for phase, part in _in_order(plan):
        if isinstance(part, Redistribution):
            for event in _collectives(plan, part, ns):
                yield event
                ns += round(event["dur"] * 1000)
            continue
        name, took = part
        if took:
            layouts = [format_layout(layout, plan.mesh) for layout in strategies[phase, name].inputs]
            runs = operator_runs(name, plan.micro_batches)
            yield _event(name, phase, COMPUTE, ns, took, {"inputs": ", ".join(layouts)} | _said(plan, runs))
        ns += took
    if plan.optimizer_s:
        said = {"optimizer": plan.memory.optimizer} if plan.memory else {}
        yield _event("optimizer step", "optimizer", COMPUTE, ns, round(plan.optimizer_s * 1e9), said)


def _in_order(plan: ShardingPlan) -> Iterator[tuple[Phase, Redistribution | tuple[str, int]]]:
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        run = [(entry.name, entry.predicted_ns) for entry in plan.execution if entry.phase == phase]
        before, after, last = _places(plan, phase, {name: place for place, (name, _) in enumerate(run)})
        for name, took in run:
            yield from ((phase, moved) for moved in before[name])
            yield phase, (name, took)
            yield from ((phase, moved) for moved in after[name])
        yield from ((phase, moved) for moved in last)


def _places(
    plan: ShardingPlan, phase: Phase, place: dict[str, int]
) -> tuple[dict[str, list[Redistribution]], dict[str, list[Redistribution]], list[Redistribution]]:
    """When redistributions run: before which operator, after which operator, or at the end of the phase."""
    before: dict[str, list[Redistribution]] = defaultdict(list)
    after: dict[str, list[Redistribution]] = defaultdict(list)
    last: list[Redistribution] = []
    parameters = {entry.name for entry in plan.parameters}
    for entry in plan.redistributions:
        if entry.phase != phase or not entry.collectives:
            continue
        consumers = [name for name in entry.consumers if name in place]
        maker = entry.tensor if entry.tensor in place else entry.tensor.rpartition(":")[0]
        if is_summed(entry.tensor):
            last.append(entry)
        elif maker in place and (not entry.consumers or parameters.intersection(entry.consumers)):
            after[maker].append(entry)
        elif consumers:
            before[min(consumers, key=place.__getitem__)].append(entry)
        else:
            last.append(entry)
    return before, after, last


def _collectives(plan: ShardingPlan, entry: Redistribution, start_ns: int) -> Iterator[Event]:
    path = " => ".join(format_layout(layout, plan.mesh) for layout in entry.path)
    for collective in entry.collectives:
        took = round(collective.predicted_s * 1e9)
        said = {"tensor": entry.tensor, "path": path, "bytes": collective.size_bytes, "for": ", ".join(entry.consumers)}
        said |= _said(plan, plan.runs(entry))
        track = FIRST_AXIS + plan.mesh.index(collective.axis)
        yield _event(f"{collective.kind} {entry.tensor}", entry.phase, track, start_ns, took, said)
        start_ns += took


def _said(plan: ShardingPlan, runs: int) -> dict[str, Any]:
    """How often something runs in a step of several micro-batches."""
    return {"runs": runs} if plan.micro_batches > 1 else {}


def _layers(events: list[Event]) -> Iterator[Event]:
    """A span for each layer or outermost module, over all that runs for it."""

    def layer(event: Event) -> tuple[str, str]:
        path = event["args"].get("tensor", event["name"]).partition("/")[0]
        components = split_name(path)[0].components
        depth = components.index(None) + 1 if None in components else 1
        return event["cat"], ".".join(path.split(".")[:depth]) or "model"

    for (phase, name), group in groupby(events, key=layer):
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
