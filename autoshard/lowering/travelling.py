"""Buckets of a schedule in the graph of one phase: what several tensors need is sent by one collective.

A bucket's buffer has the tensors one behind the other, as the steps of their redistributions would each give them to a
collective of their own (:mod:`autoshard.redistribution.execution`); for a reduce-scatter, so for every receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from ..layout import Layout
from ..plans import Redistribution
from ..plans.schedule import Bucket, Schedule, Turn
from ..redistribution import steps_along
from ..redistribution.execution import Shard, packed, run_step, unpacked
from .emitter import GraphEmitter

aten = torch.ops.aten


@dataclass
class _Member:
    """A tensor on its way: what there is of it after so many steps of its path."""

    entry: Redistribution
    value: fx.Node
    shard: Shard
    steps: int = 0

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Those before and after its next step."""
        return self.entry.path[self.steps], self.entry.path[self.steps + 1]


class Travelling:
    """The buckets of one phase.

    Args:
        start: the tensor of a redistribution as it is made, and where this rank holds it.
        arrive: called with a redistribution and the tensor in its last layout.
    """

    def __init__(
        self,
        emitter: GraphEmitter,
        schedule: Schedule,
        start: Callable[[Redistribution], tuple[fx.Node, Shard]],
        arrive: Callable[[Redistribution, fx.Node], None],
    ) -> None:
        self._emitter, self._schedule, self._start, self._arrive = emitter, schedule, start, arrive
        self._members: dict[int, list[_Member]] = {}
        self._issued: dict[int, fx.Node] = {}
        self._shapes: dict[int, list[tuple[int, ...]]] = {}

    def take(self, turn: Turn) -> None:
        """Adds what is done in a turn; turns come in the order of the schedule."""
        bucket = self._schedule.buckets[turn.bucket]
        with self._emitter.copying(_name(bucket), turn.bucket):
            if turn.what == "issue":
                self._issue(turn, bucket)
            else:
                self._wait(turn, bucket)

    def _issue(self, turn: Turn, bucket: Bucket) -> None:
        if turn.travel == 0:
            self._members[turn.bucket] = [_Member(entry, *self._start(entry)) for entry in bucket.members]
        members, emitter = self._members[turn.bucket], self._emitter
        buffers = [emitter.as_pairs(self._packed(member)) for member in members]
        self._shapes[turn.bucket] = [tuple(buffer.meta["val"].shape) for buffer in buffers]
        step = steps_along(members[0].entry.path)[members[0].steps]
        parts = members[0].shard.mesh.parts(step.axes) if step.kind == "reduce_scatter" else 1
        buffer = buffers[0] if len(buffers) == 1 else self._joined(buffers, parts)
        kind, in_place = bucket.travels[turn.travel].kind, len(buffers) > 1 and step.kind == "all_reduce"
        self._issued[turn.bucket] = emitter.issue(kind, buffer, step.axes, step.reduce, in_place=in_place)

    def _packed(self, member: _Member) -> fx.Node:
        """What the next collective takes of a tensor; steps that send nothing come before it."""
        self._run_local_steps(member)
        return packed(self._emitter, member.value, *member.layouts, member.shard)  # type: ignore[no-any-return]

    def _run_local_steps(self, member: _Member) -> None:
        steps = steps_along(member.entry.path)
        while member.steps < len(steps) and not steps[member.steps].communicates:
            member.value = run_step(self._emitter, member.value, *member.layouts, member.shard)
            member.steps += 1

    def _joined(self, buffers: Sequence[fx.Node], parts: int) -> fx.Node:
        """One buffer of several; ``parts`` is how many receivers each of them has blocks for."""
        rows = [
            self._emitter.call(aten.view.default, buffer, [parts, prod(buffer.meta["val"].shape) // parts])
            for buffer in buffers
        ]
        return self._emitter.call(aten.cat.default, rows, 1)

    def _wait(self, turn: Turn, bucket: Bucket) -> None:
        members, emitter = self._members[turn.bucket], self._emitter
        arrived = emitter.wait(self._issued.pop(turn.bucket))
        pieces = [arrived] if len(members) == 1 else self._parted(arrived, turn.bucket, members)
        for member, piece in zip(members, pieces, strict=True):
            piece = emitter.as_numbers(piece, member.value)
            member.value = unpacked(emitter, piece, *member.layouts, member.shard)
            member.steps += 1
        if turn.travel == len(bucket.travels) - 1:
            for member in self._members.pop(turn.bucket):
                self._run_local_steps(member)
                self._arrive(member.entry, member.value)

    def _parted(self, arrived: fx.Node, bucket: int, members: Sequence[_Member]) -> list[fx.Node]:
        """What arrived, tensor by tensor, as a collective of its own would have brought it. Gathered tensors are copied
        out, as what the ranks sent of each lies apart; others stay in the memory of the bucket, one behind the other.
        """
        emitter = self._emitter
        step = steps_along(members[0].entry.path)[members[0].steps]
        parts = members[0].shard.mesh.parts(step.axes)
        given = self._shapes[bucket]
        divided = parts if step.kind == "reduce_scatter" else 1
        rows = parts if step.kind == "all_gather" else 1
        sizes = [prod(shape) // divided for shape in given]
        lying = emitter.call(aten.view.default, arrived, [rows, sum(sizes)])
        split = emitter.call(aten.split_with_sizes.default, lying, sizes, 1)
        pieces = []
        for k, shape in enumerate(given):
            piece = emitter.item(split, k)
            if rows > 1:
                piece = emitter.call(aten.clone.default, piece, memory_format=torch.contiguous_format)
            shape = (shape[0] * rows // divided, *shape[1:]) if shape else shape
            pieces.append(emitter.call(aten.view.default, piece, list(shape)))
        return pieces


def _name(bucket: Bucket) -> str:
    first, others = bucket.members[0].tensor, len(bucket.members) - 1
    return f"{first} and {others} more" if others else first
