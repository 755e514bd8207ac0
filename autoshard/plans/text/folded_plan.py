"""A plan as the lines of its file: entries of identical layers stand in one line, as ``layers.*.wq.weight``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..plan import PHASES, OperatorEntry, Redistribution, ShardingPlan, TensorEntry
from .layer_relative import fold_unframed, frame_of, relative_patterns
from .name_patterns import Line, Pattern, Repeats, count_repeats, fold, fold_in_order, starred


@dataclass(frozen=True)
class FoldedPlan:
    """The lines of a plan, section by section; the file is written from them, and so are tables for people.

    The value of a line is an entry whose own name is left empty; its consumers are written relative to the tensor
    (:mod:`autoshard.plans.text.layer_relative`). ``repeats`` names the paths written with ``*``.
    """

    repeats: Repeats
    parameters: list[Line[TensorEntry]]
    buffers: list[Line[TensorEntry]]
    inputs: list[Line[TensorEntry]]
    outputs: list[Line[TensorEntry]]
    forward: list[Line[OperatorEntry]]
    backward: list[Line[OperatorEntry]]
    redistributions: list[Line[Redistribution]]

    @property
    def operators(self) -> list[Line[OperatorEntry]]:
        """The lines of the operators of both phases, the forward first."""
        return [*self.forward, *self.backward]


def fold_plan(plan: ShardingPlan) -> FoldedPlan:
    """Folds identical layers."""
    tensors = (plan.parameters, plan.buffers, plan.inputs, plan.outputs)
    names = [entry.name for entries in (*tensors, plan.operators) for entry in entries]
    moved = [name for entry in plan.redistributions for name in (entry.tensor, *entry.consumers)]
    seen = count_repeats([*names, *moved])

    parameters, buffers = (fold(_nameless(entries)) for entries in tensors[:2])
    inputs, outputs = (fold_in_order(_nameless(entries)) for entries in tensors[2:])
    forward, backward = (
        fold([(e.name, OperatorEntry("", phase, e.inputs, e.outputs)) for e in plan.operators if e.phase == phase])
        for phase in PHASES
    )
    redistributions = [
        line
        for phase in PHASES
        for line in fold([(e.tensor, _tensorless(e, seen)) for e in plan.redistributions if e.phase == phase])
    ]
    consumers = [fold_unframed(entry.consumers, frame_of(entry.tensor)) for entry in plan.redistributions]
    used = {
        prefix
        for pattern in _patterns(parameters, buffers, inputs, outputs, forward, backward, redistributions, *consumers)
        for prefix in starred(pattern, seen)
    }
    repeats = {prefix: seen[prefix] for prefix in sorted(used)}
    return FoldedPlan(repeats, parameters, buffers, inputs, outputs, forward, backward, redistributions)


def _nameless(entries: Iterable[TensorEntry]) -> list[tuple[str, TensorEntry]]:
    return [(entry.name, replace(entry, name="")) for entry in entries]


def _tensorless(entry: Redistribution, repeats: Repeats) -> Redistribution:
    return replace(entry, tensor="", consumers=relative_patterns(entry.consumers, frame_of(entry.tensor), repeats))


def _patterns(*sections: Iterable[Line[Any]]) -> Iterator[Pattern]:
    return (line.pattern for section in sections for line in section)
