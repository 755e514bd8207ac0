"""How a tensor gets from one layout to another: the steps, their bytes, and their execution.

Pricing prices the steps of :mod:`autoshard.steps` and lowering executes them, so what is planned is what runs. Uneven
shards are padded to the largest before they travel, so that no rank reads what another did not write (the silent
corruption of pytorch#194457).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch

from .layout import Layout, R, S, block, has_empty_shard, is_even, largest_local_shape, local_shape
from .layout import P as partial
from .mesh import Mesh
from .steps import Step, size_bytes, step_between, step_on, steps_along

aten = torch.ops.aten


def copied_bytes(step: Step, before: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes that the local copies of ``run_step`` read and write, on the rank that copies most.

    Blocks of dim 0 lie in a row, so they are sent, and arrive, as they are; blocks of another dim are packed before and
    joined after. Uneven shards are padded before and cut after. A slice is copied, so that the whole can go.
    """
    after = before.replace(step.axis, R if step.target < 0 else S(step.target))
    size = size_bytes(step, before, shape, itemsize, mesh)
    kept = itemsize * int(np.prod(largest_local_shape(shape, after, mesh), dtype=np.int64))
    if step.kind == "slice":
        return 2 * kept
    even = is_even(shape, before, mesh) and is_even(shape, after, mesh)
    packs = step.kind in ("reduce_scatter", "all_to_all") and (step.target > 0 or not even)
    joins = step.kind in ("all_gather", "all_to_all") and (step.source > 0 or not even)
    pads = 0 if even else 2 * size + 2 * kept
    return 2 * size * (packs + joins) + pads


def transient_bytes(path: Sequence[Layout], shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """The most that a redistribution holds at a time beside the tensor it starts from: copies, the buffers of a
    collective, the result. Exact for :func:`run_step` where every shard is even; padding of others is left out.
    """
    # Sizes are of the largest rank's shard: `taken` before a step, `made` after it, `given` as made by the step before
    # (0 for the first: what it starts from is not counted). Each case says which of them, packed or joined copies
    # included, are alive together at the fullest moments of run_step.
    most, given = 0, 0
    for step, before, after in zip(steps_along(path), path, path[1:]):
        made = itemsize * int(np.prod(largest_local_shape(shape, after, mesh), dtype=np.int64))
        taken = itemsize * int(np.prod(largest_local_shape(shape, before, mesh), dtype=np.int64))
        match step.kind:
            case "all_gather" if step.source > 0:
                most = max(most, given + made, 2 * made)
            case "reduce_scatter" if step.target > 0:
                most = max(most, given + taken, taken + made)
            case "all_to_all":
                stacked = given if step.target == 0 else taken
                joined = made if step.source > 0 else 0
                most = max(most, given + (stacked if step.target else 0), stacked + made, made + joined)
            case _:
                most = max(most, given + made)
        given = made
    return most


def layouts_of(shape: tuple[int, ...], mesh: Mesh, reduces: tuple[str, ...] = ("sum",)) -> tuple[Layout, ...]:
    """Every layout in which no rank is left without elements and an axis of one rank replicates, in a fixed order."""
    placements = [R, *(S(d) for d, size in enumerate(shape) if size > 1), *(partial(reduce) for reduce in reduces)]
    per_axis = ([R] if size == 1 else placements for size in mesh.shape)
    every = (Layout(combination) for combination in product(*per_axis))
    return tuple(layout for layout in every if not has_empty_shard(shape, layout, mesh))


@dataclass(frozen=True, eq=False)
class Paths:
    """The cheapest way between any two of ``layouts`` (L of them).

    ``seconds`` is (L, L), infinite where no steps lead; ``following[i, j]`` is the layout after ``i`` on the way to
    ``j``.
    """

    layouts: tuple[Layout, ...]
    seconds: np.ndarray
    following: np.ndarray

    def path(self, before: Layout, after: Layout) -> tuple[Layout, ...]:
        """The layouts from ``before`` to ``after``, both included."""
        at, goal = self.layouts.index(before), self.layouts.index(after)
        path = [before]
        while at != goal:
            at = int(self.following[at, goal])
            path.append(self.layouts[at])
        return tuple(path)


Price = Callable[[Step, int, int], float]


def cheapest_paths(
    layouts: tuple[Layout, ...], shape: tuple[int, ...], itemsize: int, mesh: Mesh, price: Price
) -> Paths:
    """Least-cost paths between all layouts (Floyd-Warshall), ``price(step, size_bytes, copied_bytes)`` in seconds."""
    index = {layout: i for i, layout in enumerate(layouts)}
    count = len(layouts)
    seconds = np.full((count, count), np.inf)
    following = np.tile(np.arange(count), (count, 1))
    np.fill_diagonal(seconds, 0.0)
    placements = sorted({placement for layout in layouts for placement in layout})
    for before, i in index.items():
        for axis, placement in product(range(mesh.ndim), placements):
            after = before.replace(axis, placement)
            step = step_on(before, after, axis)
            if step is not None and after in index:
                sizes = (rule(step, before, shape, itemsize, mesh) for rule in (size_bytes, copied_bytes))
                seconds[i, index[after]] = price(step, *sizes)
    for k in range(count):
        through = seconds[:, k, None] + seconds[None, k, :]
        better = through < seconds * (1 - 1e-12)
        seconds = np.where(better, through, seconds)
        following = np.where(better, following[:, k, None], following)
    return Paths(layouts, seconds, following)


class Emitter(Protocol):
    """The operations that :func:`run_step` is made of: torch operators on local tensors, and collectives along a mesh
    axis, which gather, cut or exchange blocks of dim 0.

    Lowering's emitter adds them to a graph; a test's emitter runs them at once.
    """

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies a torch operator."""

    def all_gather(self, x: Any, axis: int) -> Any:
        """Joins the equal tensors of all ranks along dim 0."""

    def reduce_scatter(self, x: Any, axis: int, reduce: str) -> Any:
        """Combines the tensors of all ranks and keeps this rank's block of dim 0."""

    def all_reduce(self, x: Any, axis: int, reduce: str) -> Any:
        """Combines the tensors of all ranks."""

    def all_to_all(self, x: Any, axis: int) -> Any:
        """Sends block ``i`` of dim 0 to rank ``i`` and joins what arrives in rank order."""


@dataclass(frozen=True)
class Shard:
    """Where a tensor of a global shape is held: the mesh and this rank's coordinate."""

    shape: tuple[int, ...]
    mesh: Mesh
    coordinate: tuple[int, ...]

    def local(self, layout: Layout) -> tuple[int, ...]:
        """This rank's shape in a layout."""
        return local_shape(self.shape, layout, self.mesh, self.coordinate)

    def largest(self, layout: Layout) -> tuple[int, ...]:
        """The largest shape of any rank in a layout."""
        return largest_local_shape(self.shape, layout, self.mesh)


def run_step(emit: Emitter, x: Any, before: Layout, after: Layout, shard: Shard) -> Any:
    """Executes one step on this rank's shard ``x``; works on tensors and on graph values alike.

    Returns the rank's shard in the layout ``after``, contiguous.
    """
    step = step_between(before, after)
    parts = shard.mesh.shape[step.axis]
    mine = shard.coordinate[step.axis]
    local, goal = shard.local(before), shard.local(after)
    if step.kind == "slice":
        start, stop = block(local[step.target], parts, mine)
        # a block of dim 0 would be contiguous, but a view that keeps the whole in memory
        piece = emit.call(aten.slice.Tensor, x, step.target, start, stop)
        return emit.call(aten.clone.default, piece, memory_format=torch.contiguous_format)
    padded = shard.largest(before)
    if step.kind == "all_reduce":
        x = emit.call(aten.contiguous.default, _pad(emit, x, local, padded))
        return _cut(emit, emit.all_reduce(x, step.axis, step.reduce), padded, goal)
    if step.kind == "all_gather":
        x = emit.call(aten.contiguous.default, _pad(emit, x, local, padded))
        gathered = emit.all_gather(x, step.axis)
        return _join(emit, gathered, padded, goal, step.source, parts)
    # Reduce-scatter and all-to-all both send block r of the target dim to rank r. Collectives exchange blocks of dim 0
    # of one buffer, so the blocks are cut along the target dim, padded to the widest, and stacked along dim 0. What an
    # all-to-all brings from the other ranks is joined along the source dim. Example, S(0) -> S(1) of a (4, 6) tensor
    # on two ranks: a rank holds (2, 6), cuts it into two (2, 3) and stacks them to (4, 3); it gets one (2, 3) of its
    # own columns from each rank, and joins the two along dim 0 to (4, 3).
    width = -(-padded[step.target] // parts)
    piece_shape = _with(padded, step.target, width)
    if step.target == 0 and local == _with(padded, 0, width * parts):
        stacked = emit.call(aten.contiguous.default, x)  # the blocks lie in a row already
    else:
        blocks = (block(local[step.target], parts, r) for r in range(parts))
        pieces = [_pad(emit, *_slice(emit, x, local, step.target, start, stop), piece_shape) for start, stop in blocks]
        stacked = emit.call(aten.cat.default, pieces, 0)
    if step.kind == "reduce_scatter":
        return _cut(emit, emit.reduce_scatter(stacked, step.axis, step.reduce), piece_shape, goal)
    return _join(emit, emit.all_to_all(stacked, step.axis), piece_shape, goal, step.source, parts)


def _join(emit: Emitter, x: Any, piece: tuple[int, ...], goal: tuple[int, ...], dim: int, parts: int) -> Any:
    """Cuts the padding off each of the pieces that arrived along dim 0 and joins them along ``dim``."""
    if dim == 0 and _with(piece, 0, piece[0] * parts) == goal:
        return x
    pieces = []
    for r in range(parts):
        start, stop = block(goal[dim], parts, r)
        arrived, shape = _slice(emit, x, _with(piece, 0, piece[0] * parts), 0, r * piece[0], (r + 1) * piece[0])
        pieces.append(_cut(emit, arrived, shape, _with(goal, dim, stop - start)))
    return emit.call(aten.cat.default, pieces, dim)


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
