"""Executes the steps of a redistribution on one rank's shard: on tensors, or on the values of a graph being built.

Pricing prices the steps of :mod:`autoshard.redistribution.steps` and lowering executes them here, so what is planned is
what runs. Uneven shards are padded to the largest before they travel, so that no rank reads what another did not
write (the silent corruption of pytorch#194457).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import prod
from typing import Any, Protocol

import torch

from ..layout import Layout, block, largest_local_shape, local_shape, pieces
from ..mesh import Mesh
from .steps import Step, step_between

aten = torch.ops.aten

_WORD = torch.int64


class Emitter(Protocol):
    """The operations that :func:`run_step` is made of: torch operators on local tensors, and collectives along mesh
    axes, which gather, cut or exchange blocks of dim 0; ranks of several axes count as they do in the mesh.

    Lowering's emitter adds them to a graph; a test's emitter runs them at once.
    """

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies a torch operator."""

    def value(self, x: Any) -> torch.Tensor:
        """A tensor as it is; for a value of a graph one that looks like it, whose numbers nobody reads."""

    def all_gather(self, x: Any, axes: tuple[int, ...]) -> Any:
        """Joins the equal tensors of all ranks along dim 0."""

    def reduce_scatter(self, x: Any, axes: tuple[int, ...], reduce: str) -> Any:
        """Combines the tensors of all ranks and keeps this rank's block of dim 0."""

    def all_reduce(self, x: Any, axes: tuple[int, ...], reduce: str) -> Any:
        """Combines the tensors of all ranks."""

    def all_to_all(self, x: Any, axes: tuple[int, ...]) -> Any:
        """Sends block ``i`` of dim 0 to rank ``i`` and joins what arrives in rank order."""


@dataclass(frozen=True)
class Shard:
    """Where a tensor of a global shape is held: the mesh and this rank's coordinate."""

    shape: tuple[int, ...]
    mesh: Mesh
    coordinate: tuple[int, ...]

    @cached_property
    def local(self) -> Callable[[Layout], tuple[int, ...]]:
        """This rank's shape in a layout, worked out once for each."""
        return cache(partial(local_shape, self.shape, mesh=self.mesh, coordinate=self.coordinate))

    @cached_property
    def largest(self) -> Callable[[Layout], tuple[int, ...]]:
        """The largest shape of any rank in a layout."""
        return cache(partial(largest_local_shape, self.shape, mesh=self.mesh))

    def blocks(self, size: int, axes: tuple[int, ...]) -> list[tuple[int, int]]:
        """``[start, stop)`` of each rank's block, in their order, where a dim of length ``size`` is cut along axes."""
        found = [(0, size)]
        for axis in axes:
            parts = self.mesh.shape[axis]
            cuts = ((start, block(stop - start, parts, k)) for start, stop in found for k in range(parts))
            found = [(start + low, start + high) for start, (low, high) in cuts]
        return found


def run_step(emit: Emitter, x: Any, before: Layout, after: Layout, shard: Shard) -> Any:
    """Executes one step on this rank's shard ``x``; works on tensors and on graph values alike.

    Returns the rank's shard in the layout ``after``, contiguous.
    """
    step = step_between(before, after)
    if step.kind == "slice":
        (axis,) = step.axes
        length, ranks = shard.local(before)[step.target], shard.mesh.shape[axis]
        found = []
        for begin, end in pieces(length, step.target_parts):
            start, stop = block(end - begin, ranks, shard.coordinate[axis])
            found.append(emit.call(aten.slice.Tensor, x, step.target, begin + start, begin + stop))
        if len(found) > 1:
            return _joined(emit, found, step.target)
        # a block of dim 0 would be contiguous, but a view that keeps the whole in memory
        return emit.call(aten.clone.default, found[0], memory_format=torch.contiguous_format)
    given = packed(emit, x, before, after, shard)
    match step.kind:
        case "all_reduce":
            arrived = emit.all_reduce(given, step.axes, step.reduce)
        case "all_gather":
            arrived = emit.all_gather(given, step.axes)
        case "reduce_scatter":
            arrived = emit.reduce_scatter(given, step.axes, step.reduce)
        case "all_to_all":
            arrived = emit.all_to_all(given, step.axes)
    return unpacked(emit, arrived, before, after, shard)


def packed(emit: Emitter, x: Any, before: Layout, after: Layout, shard: Shard) -> Any:
    """What a rank gives to the collective of a step: its shard, contiguous, padded to the largest of any rank.

    Reduce-scatter and all-to-all both send block r of the target dim to rank r. Collectives exchange blocks of dim 0
    of one buffer, so the blocks are cut along the target dim, padded to the widest, and stacked along dim 0. What an
    all-to-all brings from the other ranks is joined along the source dim. Example, S(0) -> S(1) of a (4, 6) tensor
    on two ranks: a rank holds (2, 6), cuts it into two (2, 3) and stacks them to (4, 3); it gets one (2, 3) of its
    own columns from each rank, and joins the two along dim 0 to (4, 3).
    """
    step = step_between(before, after)
    local, padded = shard.local(before), shard.largest(before)
    if step.kind in ("all_reduce", "all_gather"):
        return emit.call(aten.contiguous.default, _pad(emit, x, local, padded))
    piece_shape = _piece(step, before, after, shard)
    if step.target_parts:
        return _packed_parts(emit, x, local, piece_shape, step, shard)
    if step.target == 0 and local == _with(padded, 0, piece_shape[0] * shard.mesh.parts(step.axes)):
        return emit.call(aten.contiguous.default, x)  # the blocks lie in a row already
    blocks = shard.blocks(local[step.target], step.axes)
    if _with(local, step.target, blocks[0][1]) == piece_shape and _in_a_row(blocks, local[step.target]):
        return _stacked(emit, x, local, step.target, len(blocks))
    given = [_pad(emit, *_slice(emit, x, local, step.target, start, stop), piece_shape) for start, stop in blocks]
    return _joined(emit, given, 0)


def _packed_parts(
    emit: Emitter, x: Any, local: tuple[int, ...], piece: tuple[int, ...], step: Step, shard: Shard
) -> Any:
    """The blocks of a dim that is cut in parts, stacked along dim 0: of each rank that of every part, in one."""
    ranks, dim = shard.mesh.parts(step.axes), step.target
    shape = _with(piece, dim, local[dim])
    x = _pad(emit, x, local, shape)
    order = [dim, *(d for d in range(len(shape) + 1) if d != dim)]
    cut = []
    for start, stop in pieces(shape[dim], step.target_parts):
        part, _ = _slice(emit, x, shape, dim, start, stop)
        split = [*shape[:dim], ranks, (stop - start) // ranks, *shape[dim + 1 :]]
        apart = emit.call(aten.reshape.default, part, split)
        cut.append(emit.call(aten.permute.default, apart, order))
    stacked = _joined(emit, cut, dim + 1)
    return emit.call(aten.reshape.default, stacked, [ranks * piece[0], *piece[1:]])


def unpacked(emit: Emitter, arrived: Any, before: Layout, after: Layout, shard: Shard) -> Any:
    """The rank's shard after a step, of what its collective brought."""
    step = step_between(before, after)
    padded, goal = shard.largest(before), shard.local(after)
    match step.kind:
        case "all_reduce":
            return _cut(emit, arrived, padded, goal)
        case "all_gather":
            return _join(emit, arrived, padded, goal, step, shard)
        case "reduce_scatter":
            return _cut(emit, arrived, _piece(step, before, after, shard), goal)
    return _join(emit, arrived, _piece(step, before, after, shard), goal, step, shard)


def _piece(step: Step, before: Layout, after: Layout, shard: Shard) -> tuple[int, ...]:
    """The shape of what one rank sends to one other."""
    return _with(shard.largest(before), step.target, shard.largest(after)[step.target])


def _join(emit: Emitter, x: Any, piece: tuple[int, ...], goal: tuple[int, ...], step: Step, shard: Shard) -> Any:
    """Cuts the padding off each of the pieces that arrived along dim 0 and joins them along the dim they are cut on."""
    dim = step.source
    whole = _with(piece, 0, piece[0] * shard.mesh.parts(step.axes))
    if not step.joins and whole == goal:
        return x
    found = []
    blocks = shard.blocks(goal[dim], step.axes)
    if not step.source_parts and _with(goal, dim, blocks[0][1]) == piece and _in_a_row(blocks, goal[dim]):
        return _joined(emit, _blocks(emit, x, whole, 0, len(blocks)), dim)
    for r, (start, stop) in enumerate(blocks):
        arrived, shape = _slice(emit, x, whole, 0, r * piece[0], (r + 1) * piece[0])
        found.append(_cut(emit, arrived, shape, _with(goal, dim, stop - start)))
    if step.source_parts:  # those of every rank of the first part, of the second, and so on
        parts = pieces(goal[dim] // len(found), step.source_parts)
        found = [emit.call(aten.slice.Tensor, each, dim, start, stop) for start, stop in parts for each in found]
    return _joined(emit, found, dim)


def _joined(emit: Emitter, tensors: Any, dim: int) -> Any:
    """Tensors joined along a dim, contiguous: of images that have their channels last ``cat`` makes one that has, too,
    while collectives exchange blocks of dim 0 as they lie in memory.
    """
    return emit.call(aten.contiguous.default, emit.call(aten.cat.default, tensors, dim))


def _in_a_row(blocks: Sequence[tuple[int, int]], length: int) -> bool:
    """Whether blocks of a dim of so many elements are equal parts of it, in order."""
    size, rest = divmod(length, len(blocks))
    return size > 0 and not rest and list(blocks) == [(start, start + size) for start in range(0, length, size)]


def _stacked(emit: Emitter, x: Any, shape: tuple[int, ...], dim: int, count: int) -> Any:
    """So many equal parts of a dim, one behind the other along dim 0.

    One copy, in words of eight bytes where the parts are made of such: 128 MiB of bfloat16 numbers take 95 us so on an
    H100, and 161 by ``cat``. On a CPU both take the same time.
    """
    looks = emit.value(x)
    if not looks.is_contiguous():
        return _joined(emit, _blocks(emit, x, shape, dim, count), 0)
    length = shape[dim] // count
    outer, inner = prod(shape[:dim]), length * prod(shape[dim + 1 :])
    apart = [outer, count, inner] if outer != 1 else [count, inner]  # of one element strides may be any number
    lying = emit.call(aten.view.default, x, apart)
    each = _WORD.itemsize // looks.dtype.itemsize
    is_wide = each > 1 and inner > 0 and inner % each == 0 and looks.storage_offset() % each == 0
    if is_wide:
        lying = emit.call(aten.view.dtype, lying, _WORD)
    turned = emit.call(aten.permute.default, lying, [1, 0, 2]) if outer != 1 else lying
    stacked = emit.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    if is_wide:
        stacked = emit.call(aten.view.dtype, stacked, looks.dtype)
    return emit.call(aten.view.default, stacked, [count * shape[0], *_with(shape, dim, length)[1:]])


def _blocks(emit: Emitter, x: Any, shape: tuple[int, ...], dim: int, count: int) -> Any:
    """So many equal parts of a dim, by one call: as slices they would be one each."""
    apart = emit.call(aten.view.default, x, [*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :]])
    return emit.call(aten.unbind.int, apart, dim)


def _slice(
    emit: Emitter, x: Any, shape: tuple[int, ...], dim: int, start: int, stop: int
) -> tuple[Any, tuple[int, ...]]:
    return emit.call(aten.slice.Tensor, x, dim, start, stop), _with(shape, dim, stop - start)


def _pad(emit: Emitter, x: Any, shape: tuple[int, ...], goal: tuple[int, ...]) -> Any:
    if shape == goal:
        return x
    widths = [width for size, end in zip(reversed(shape), reversed(goal)) for width in (0, end - size)]
    return emit.call(aten.constant_pad_nd.default, x, widths)


def _cut(emit: Emitter, x: Any, shape: tuple[int, ...], goal: tuple[int, ...]) -> Any:
    if shape == goal:
        return x
    for dim, (size, end) in enumerate(zip(shape, goal)):
        if size != end:
            x = emit.call(aten.slice.Tensor, x, dim, 0, end)
    return emit.call(aten.contiguous.default, x)


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])
