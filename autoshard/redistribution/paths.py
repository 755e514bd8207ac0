"""The steps between the layouts of a tensor, the cheapest way from any to any other, and what these copy and hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..layout import P_SUM, Layout, Placement, R, S, is_even, is_possible, largest_local_shape
from ..mesh import Mesh
from .steps import Step, buffer_bytes, size_bytes, step_on, steps_along

IntArray: TypeAlias = npt.NDArray[np.int64]
FloatArray: TypeAlias = npt.NDArray[np.float64]


def copied_bytes(step: Step, before: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes that the local copies of ``run_step`` read and write, on the rank that copies most.

    Blocks of dim 0 lie in a row, so they are sent, and arrive, as they are; blocks of another dim are packed before and
    joined after. Uneven shards are padded before and cut after. A slice is copied, so that the whole can go.
    """
    after = before.replace(step.axes, R if step.target < 0 else S(step.target, step.target_parts))
    size = size_bytes(step, before, shape, itemsize, mesh)
    kept = itemsize * prod(largest_local_shape(shape, after, mesh))
    uneven = not (is_even(shape, before, mesh) and is_even(shape, after, mesh))
    return int(_copied(step, size, kept, int(uneven)))


def _copied(step: Step, size: int | IntArray, kept: int | IntArray, uneven: int | IntArray) -> int | IntArray:
    """The bytes by those that are sent and kept, and 1 where a shard is uneven, else 0: of one layout, or several."""
    if step.kind == "slice":
        return 2 * kept
    packs = (step.kind in ("reduce_scatter", "all_to_all")) * (1 if step.packs else uneven)
    joins = (step.kind in ("all_gather", "all_to_all")) * (1 if step.joins else uneven)
    return 2 * size * (packs + joins) + uneven * (2 * size + 2 * kept)


def transient_bytes(path: Sequence[Layout], shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """The most that a redistribution holds at a time beside the tensor it starts from: copies, the buffers of a
    collective, the result. Exact for ``run_step`` where every shard is even; padding of others is left out.
    """
    # Sizes are of the largest rank's shard: `taken` before a step, `made` after it, `given` as made by the step before
    # (0 for the first: what it starts from is not counted). Each case says which of them, packed or joined copies
    # included, are alive together at the fullest moments of run_step.
    most, given = 0, 0
    for step, before, after in zip(steps_along(path), path, path[1:]):
        made = itemsize * int(np.prod(largest_local_shape(shape, after, mesh), dtype=np.int64))
        taken = itemsize * int(np.prod(largest_local_shape(shape, before, mesh), dtype=np.int64))
        match step.kind:
            case "all_gather" if step.joins:
                most = max(most, given + made, 2 * made)
            case "reduce_scatter" if step.packs:
                most = max(most, given + taken, taken + made)
            case "all_to_all":
                stacked = taken if step.packs else given
                joined = made if step.joins else 0
                most = max(most, given + (stacked if step.packs else 0), stacked + made, made + joined)
            case _:
                most = max(most, given + made)
        given = made
    return most


KNOWN = 512
"""Of how many tensors the moves between layouts are remembered, for all programs of a process."""


@lru_cache(maxsize=KNOWN)
def layouts_of(
    shape: tuple[int, ...], mesh: Mesh, further: frozenset[Placement] = frozenset({P_SUM})
) -> tuple[Layout, ...]:
    """Every layout in which no rank is left without elements and an axis of one rank replicates, in a fixed order.

    Args:
        further: the placements beside whole and cut that are among them: addends, and dims cut in parts.
    """
    placements = [R, *(S(d) for d, size in enumerate(shape) if size > 1), *sorted(further)]
    per_axis = ([R] if size == 1 else placements for size in mesh.shape)
    every = (Layout(combination) for combination in product(*per_axis))
    return tuple(layout for layout in every if is_possible(shape, layout, mesh))


Price = Callable[[Step, IntArray, IntArray], FloatArray]


@dataclass(frozen=True, eq=False)
class Steps:
    """The single steps between ``layouts``: from ``layouts[tails[k]]`` to ``layouts[heads[k]]`` in ``seconds[k]``."""

    layouts: tuple[Layout, ...]
    tails: IntArray
    heads: IntArray
    seconds: FloatArray


def single_steps(layouts: tuple[Layout, ...], shape: tuple[int, ...], itemsize: int, mesh: Mesh, price: Price) -> Steps:
    """All steps, ``price(step, size_bytes, copied_bytes)`` in seconds; those of an infinite price are left out, and
    those over several axes that are no cheaper than one over one of them and then one over the others, or bring blocks
    of ranks that do not rise in the order of the mesh.

    Args:
        price: of a step from several layouts, that many numbers of bytes.
    """
    known = np.full((len(layouts), len(layouts)), math.inf)
    moves = _moves(layouts, mesh, _falling(mesh))
    kept: list[tuple[IntArray, IntArray]] = []
    sizes = _sizes(layouts, shape, itemsize, mesh, _falling(mesh))
    for move, (size, copied) in zip(moves, sizes, strict=True):
        seconds = np.broadcast_to(price(move.step, size, copied), len(size))
        apart = np.full(len(size), math.inf)
        for between in move.between:
            there = np.flatnonzero(between >= 0)
            before, middle, after = move.before[there], between[there], move.after[there]
            apart[there] = np.minimum(apart[there], known[before, middle] + known[middle, after])
        found = np.flatnonzero(seconds < apart)
        known[move.before[found], move.after[found]] = seconds[found]
        kept.append((move.order[found], move.before[found] * len(layouts) + move.after[found]))
    order, ends = (np.concatenate([each[k] for each in kept] or [np.zeros(0, np.int64)]) for k in range(2))
    tails, heads = np.divmod(ends[np.argsort(order)], len(layouts))
    return Steps(layouts, tails, heads, known[tails, heads])


@dataclass(frozen=True, eq=False)
class _Moves:
    """One step, from all layouts in which it can be taken: by the numbers of these and of those that it leads to.

    Attributes:
        order: where each of them stands among all moves.
        between: of a step over several axes for each of them the layouts where it has been taken over that one; -1
            where there is no such layout.
    """

    step: Step
    order: IntArray
    before: IntArray
    after: IntArray
    between: tuple[IntArray, ...]


def _falling(mesh: Mesh) -> frozenset[tuple[int, ...]]:
    """The axes, several together, along which ranks do not rise. Meshes that are equal may differ in that."""
    groups = (axes for count in range(2, mesh.ndim + 1) for axes in combinations(range(mesh.ndim), count))
    return frozenset(axes for axes in groups if not mesh.is_rising(axes))


@lru_cache(maxsize=KNOWN)
def _moves(layouts: tuple[Layout, ...], mesh: Mesh, falling: frozenset[tuple[int, ...]]) -> tuple[_Moves, ...]:
    """All steps between layouts, those over few axes first, none that brings blocks over axes that are ``falling``.
    Programs of a model differ in prices alone, and tensors of many shapes have the same layouts.

    A layout is written as a number, with its placements as digits, so that a placement is exchanged for another one by
    adding the same to all that have it.
    """
    placements = sorted({placement for layout in layouts for placement in layout})
    digit = {placement: k for k, placement in enumerate(placements)}
    digits = np.array([[digit[placement] for placement in layout] for layout in layouts], np.int64)
    digits = digits.reshape(len(layouts), mesh.ndim)
    weights = len(placements) ** np.arange(mesh.ndim - 1, -1, -1, dtype=np.int64)
    index = np.full(len(placements) ** mesh.ndim, -1, np.int64)
    index[digits @ weights] = np.arange(len(layouts))
    groups = [axes for count in range(1, mesh.ndim + 1) for axes in combinations(range(mesh.ndim), count)]
    found = []
    for (number, axes), old, new in product(enumerate(groups), range(len(placements)), range(len(placements))):
        before = np.flatnonzero((digits[:, list(axes)] == old).all(axis=1)) if old != new else digits[:0, 0]
        after = index[digits[before] @ weights + (new - old) * weights[list(axes)].sum()]
        before, after = before[after >= 0], after[after >= 0]
        later = [axis for axis in range(axes[0], mesh.ndim) if axis not in axes]
        dims = {placements[k].dim for k in (old, new) if placements[k].kind == "S"}
        cuts = [k for k, placement in enumerate(placements) if placement.dim in dims]
        is_inner = ~np.isin(digits[before][:, later], cuts).any(axis=1)  # else another cut of the dim is in the way
        before, after = before[is_inner], after[is_inner]
        step = step_on(layouts[before[0]], layouts[after[0]], axes) if len(before) else None
        if step is None or (axes in falling and step.kind != "all_reduce"):
            continue
        single = [digits[before] @ weights + (new - old) * weights[axis] for axis in axes] if len(axes) > 1 else []
        order = ((len(axes) * len(layouts) + before) * len(groups) + number) * len(placements) + new
        found.append(_Moves(step, order, before, after, tuple(index[each] for each in single)))
    return tuple(found)


@lru_cache(maxsize=KNOWN)
def _sizes(
    layouts: tuple[Layout, ...], shape: tuple[int, ...], itemsize: int, mesh: Mesh, falling: frozenset[tuple[int, ...]]
) -> tuple[tuple[IntArray, IntArray], ...]:
    """Bytes that each of the moves sends, and that it copies."""
    shards = np.array([largest_local_shape(shape, layout, mesh) for layout in layouts], np.int64)
    shards = shards.reshape(len(layouts), len(shape))
    held = itemsize * shards.prod(axis=1)
    uneven = np.array([not is_even(shape, layout, mesh) for layout in layouts], np.int64)

    def sizes(move: _Moves) -> tuple[IntArray, IntArray]:
        size = buffer_bytes(move.step, list(shards[move.before].T), itemsize, mesh)
        size = np.broadcast_to(np.asarray(size, np.int64), len(move.before))
        copied = _copied(move.step, size, held[move.after], uneven[move.before] | uneven[move.after])
        return size, np.asarray(copied, np.int64)

    return tuple(sizes(move) for move in _moves(layouts, mesh, falling))


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


def cheapest_paths(steps: Steps) -> Paths:
    """Least-cost paths between all layouts (Floyd-Warshall)."""
    count = len(steps.layouts)
    seconds = np.full((count, count), np.inf)
    following = np.tile(np.arange(count), (count, 1))
    np.fill_diagonal(seconds, 0.0)
    seconds[steps.tails, steps.heads] = steps.seconds
    for k in range(count):
        through = seconds[:, k, None] + seconds[None, k, :]
        better = through < seconds * (1 - 1e-12)
        seconds = np.where(better, through, seconds)
        following = np.where(better, following[:, k, None], following)
    return Paths(steps.layouts, seconds, following)
