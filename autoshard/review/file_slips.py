"""Where a plan file lists other tensors or operators than the model that it was made for has.

Names, shapes and dtypes are the model's and no decisions: where one of them differs, whoever edited the file slipped,
and a layout beside a misspelt name would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator

from cost_models.spelling import closest

from ..capture import CapturedGraph
from ..plans import ShardingPlan
from ..plans.text.line_numbers import line_of_decision
from .model_changes import ModelChange, model_changes

PUT_BACK = "Names, shapes and dtypes are the model's, and only layouts are edited: write what the model has"


def slips_of(plan: ShardingPlan, graph: CapturedGraph, text: str = "") -> tuple[str, ...]:
    """What a file lists otherwise than the graph that it names has it, in a sentence each: empty for a good file.

    Args:
        text: the file, so that a sentence can begin with its line.
    """
    changes = model_changes(plan, graph)
    added = [(change.kind, change.pattern) for change in changes if change.change == "added"]
    slips = []
    for change in changes:
        if change.change == "removed":
            free = [pattern for kind, pattern in added if kind == change.kind]
            meant = free[0] if len(free) == 1 else closest(change.pattern, free)
            if meant is not None:
                added.remove((change.kind, meant))
            slips.append(_at(change, text) + _unknown(change, meant))
        elif change.change == "changed":
            before, _, now = change.said.partition(" -> ")
            slips.append(f"{_at(change, text)}the {_called(change)} is {before} in the file, but {now} in the model")
    slips += [
        f"the model has the {_called(change)}, which the file does not list"
        for change in changes
        if change.change == "added" and (change.kind, change.pattern) in added
    ]
    return (*slips, *([] if slips else _order(plan, graph)))


def _at(change: ModelChange, text: str) -> str:
    line = line_of_decision(text, change.first) if text else None
    return f"line {line}: " if line else ""


def _called(change: ModelChange) -> str:
    return f"{change.kind} {change.pattern}" + (f" ({change.count})" if change.count > 1 else "")


def _unknown(change: ModelChange, meant: str | None) -> str:
    said = f"the model has no {_called(change)}"
    return said if meant is None else f"{said}; did you mean {meant!r}?"


def _order(plan: ShardingPlan, graph: CapturedGraph) -> Iterator[str]:
    listed, found = [entry.name for entry in plan.inputs], [node.name for _, node in graph.of_kind("input")]
    if listed != found:
        yield f"the inputs are {', '.join(listed)} in the file, but {', '.join(found)} in the model, in this order"
