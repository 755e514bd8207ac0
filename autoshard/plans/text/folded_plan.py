"""A plan as the lines of its file: entries of identical layers stand in one line, as ``layers.*.wq.weight``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..plan import PHASES, OperatorEntry, Redistribution, ShardingPlan, TensorEntry
from .execution_order import Block, fold_execution
from .layer_relative import fold_unframed, frame_of, relative_patterns
from .name_patterns import Line, Pattern, Repeats, V, count_repeats, fold, fold_in_order, starred
from .numbered_layers import Numbering, can_be_numbered


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
    short = plan.shortened()
    if not can_be_numbered(short):
        short = plan
    numbering = Numbering(short.left_out)
    tensors = (short.parameters, short.buffers, short.inputs, short.outputs)
    named = [[(numbering.name(entry.name), replace(entry, name="")) for entry in entries] for entries in tensors]
    operators = [(numbering.name(entry.name), entry) for entry in short.operators]
    moved = [numbering.moved(entry) for entry in short.redistributions]
    names = [name for entries in named for name, _ in entries] + [name for name, _ in operators]
    seen = numbering.repeats(count_repeats([*names, *(name for e in moved for name in (e.tensor, *e.consumers))]))

    def filled(lines: Iterable[Line[V]]) -> list[Line[V]]:
        return [Line(numbering.filled(line.pattern), line.value) for line in lines]

    parameters, buffers = (filled(fold(entries)) for entries in named[:2])
    inputs, outputs = (fold_in_order(entries) for entries in named[2:])
    forward, backward = (
        filled(
            fold([(name, OperatorEntry("", phase, e.inputs, e.outputs)) for name, e in operators if e.phase == phase])
        )
        for phase in PHASES
    )
    redistributions = [
        line
        for phase in PHASES
        for line in filled(fold([(e.tensor, _tensorless(e, seen, numbering)) for e in moved if e.phase == phase]))
    ]
    consumers = [filled(fold_unframed(entry.consumers, frame_of(entry.tensor))) for entry in moved]
    used = {
        prefix
        for pattern in _patterns(parameters, buffers, inputs, outputs, forward, backward, redistributions, *consumers)
        for prefix in starred(pattern, seen)
    }
    repeats = {prefix: seen[prefix] for prefix in sorted(used)}
    return FoldedPlan(repeats, parameters, buffers, inputs, outputs, forward, backward, redistributions)


def folded_execution(plan: ShardingPlan) -> list[Block]:
    """The execution of each phase, layers that run alike as one."""
    short = plan.shortened()
    if short is not plan and can_be_numbered(short):
        numbering = Numbering(short.left_out)
        found = [numbering.execution(block) for block in _blocks(short, numbering)]
        if None not in found:
            return [block for block in found if block is not None]
    return list(_blocks(plan, Numbering(())))


def _blocks(plan: ShardingPlan, numbering: Numbering) -> Iterator[Block]:
    for phase in PHASES:
        yield fold_execution([(numbering.name(e.name), e.predicted_ns) for e in plan.execution if e.phase == phase])


def _tensorless(entry: Redistribution, repeats: Repeats, numbering: Numbering) -> Redistribution:
    consumers = relative_patterns(entry.consumers, frame_of(entry.tensor), repeats, numbering.filled)
    return replace(entry, tensor="", consumers=consumers)


def _patterns(*sections: Iterable[Line[Any]]) -> Iterator[Pattern]:
    return (line.pattern for section in sections for line in section)
