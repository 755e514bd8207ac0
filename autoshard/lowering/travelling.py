"""Buckets of a schedule in the graph of one phase: what several tensors need is sent by one collective.

A bucket's buffer has the tensors one behind the other, as the steps of their redistributions would each give them to a
collective of their own (:mod:`autoshard.redistribution.execution`); for a reduce-scatter, so for every receiver. What
is all-reduced first is written there as it is made, where it is what an operator gives that can
(:mod:`autoshard.lowering.filled`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from .filled import Filled

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
        start: the tensor of a redistribution as it is made.
        shard: where this rank holds the tensor of a redistribution.
        arrive: called with the redistributions of a bucket and their tensors in their last layouts.
    """

    def __init__(
        self,
        emitter: GraphEmitter,
        schedule: Schedule,
        start: Callable[[Redistribution], fx.Node],
        shard: Callable[[Redistribution], Shard],
        arrive: Callable[[Mapping[Redistribution, fx.Node]], None],
    ) -> None:
        self._emitter, self._schedule = emitter, schedule
        self._start, self._shard, self._arrive = start, shard, arrive
        self._members: dict[int, list[_Member]] = {}
        self._issued: dict[int, fx.Node] = {}
        self._shapes: dict[int, list[tuple[int, ...]]] = {}
        self._filled: dict[int, Filled] = {}
        self._places = {
            entry: (number, k)
            for number, bucket in enumerate(schedule.buckets)
            if len(bucket.members) > 1 and bucket.travels[0].kind == "all_reduce"
            for k, entry in enumerate(bucket.members)
        }

    def place(self, entry: Redistribution, dtype: torch.dtype, device: torch.device) -> fx.Node | None:
        """Where the tensor of a redistribution is to be written as it is made, so that it is not copied to travel; None
        where it does not travel as it is made, or alone.
        """
        number, k = self._places.get(entry, (-1, -1))
        shard = self._shard(entry)
        shape = shard.local(entry.path[0])
        if number < 0 or _first_sent(entry) or shape != shard.largest(entry.path[0]) or dtype.is_complex:
            return None
        bucket = self._schedule.buckets[number]
        with self._emitter.copying(bucket_name(bucket), number):
            if number not in self._filled:
                sizes = [prod(self._shard(each).largest(each.path[_first_sent(each)])) for each in bucket.members]
                self._filled[number] = Filled(self._emitter, sizes, dtype, device)
            return self._filled[number].place(k, shape)

    def take(self, turn: Turn) -> None:
        """Adds what is done in a turn; turns come in the order of the schedule."""
        bucket = self._schedule.buckets[turn.bucket]
        with self._emitter.copying(bucket_name(bucket), turn.bucket):
            if turn.what == "issue":
                self._issue(turn, bucket)
            else:
                self._wait(turn, bucket)

    def _issue(self, turn: Turn, bucket: Bucket) -> None:
        if turn.travel == 0:
            self._members[turn.bucket] = [
                _Member(entry, self._start(entry), self._shard(entry)) for entry in bucket.members
            ]
        members, emitter = self._members[turn.bucket], self._emitter
        buffers = [emitter.as_pairs(self._packed(member)) for member in members]
        self._shapes[turn.bucket] = [tuple(buffer.meta["val"].shape) for buffer in buffers]
        step = steps_along(members[0].entry.path)[members[0].steps]
        parts = members[0].shard.mesh.parts(step.axes) if step.kind == "reduce_scatter" else 1
        filled = self._filled.pop(turn.bucket, None)
        if filled is not None:
            buffer = filled.complete(buffers)
        else:
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
            there = self._members.pop(turn.bucket)
            for member in there:
                self._run_local_steps(member)
            self._arrive({member.entry: member.value for member in there})

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


def _first_sent(entry: Redistribution) -> int:
    """How many steps of a path come before the first that communicates."""
    return next(k for k, step in enumerate(steps_along(entry.path)) if step.communicates)


def bucket_name(bucket: Bucket) -> str:
    """What the tensors of a bucket are called together."""
    first, others = bucket.members[0].tensor, len(bucket.members) - 1
    return f"{first} and {others} more" if others else first
