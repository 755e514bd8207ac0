"""The steps between the layouts of a tensor, the cheapest way from any to any other, and what these copy and hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from ..layout import P_SUM, Layout, Placement, R, S, is_even, is_possible, largest_local_shape
from ..mesh import Mesh
from .steps import Step, size_bytes, step_on, steps_along


def copied_bytes(step: Step, before: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes that the local copies of ``run_step`` read and write, on the rank that copies most.

    Blocks of dim 0 lie in a row, so they are sent, and arrive, as they are; blocks of another dim are packed before and
    joined after. Uneven shards are padded before and cut after. A slice is copied, so that the whole can go.
    """
    after = before.replace(step.axes, R if step.target < 0 else S(step.target, step.target_parts))
    size = size_bytes(step, before, shape, itemsize, mesh)
    kept = itemsize * int(np.prod(largest_local_shape(shape, after, mesh), dtype=np.int64))
    if step.kind == "slice":
        return 2 * kept
    even = is_even(shape, before, mesh) and is_even(shape, after, mesh)
    packs = step.kind in ("reduce_scatter", "all_to_all") and (step.packs or not even)
    joins = step.kind in ("all_gather", "all_to_all") and (step.joins or not even)
    pads = 0 if even else 2 * size + 2 * kept
    return 2 * size * (packs + joins) + pads


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


Price = Callable[[Step, int, int], float]


@dataclass(frozen=True, eq=False)
class Steps:
    """The single steps between ``layouts``: from ``layouts[tails[k]]`` to ``layouts[heads[k]]`` in ``seconds[k]``."""

    layouts: tuple[Layout, ...]
    tails: np.ndarray
    heads: np.ndarray
    seconds: np.ndarray


def single_steps(layouts: tuple[Layout, ...], shape: tuple[int, ...], itemsize: int, mesh: Mesh, price: Price) -> Steps:
    """All steps, ``price(step, size_bytes, copied_bytes)`` in seconds; those of an infinite price are left out, and
    those over several axes that are no cheaper than one over one of them and then one over the others, or bring blocks
    of ranks that do not rise in the order of the mesh.
    """
    found: dict[tuple[int, int], float] = {}
    falling = _falling(mesh)
    sizes_of_moves = _sizes(layouts, shape, itemsize, mesh, falling)
    for (i, j, step, between), sizes in zip(_moves(layouts, mesh, falling), sizes_of_moves):
        seconds = price(step, *sizes)
        apart = (found.get((i, k), math.inf) + found.get((k, j), math.inf) for k in between)
        if seconds < min(apart, default=math.inf):
            found[i, j] = seconds
    tails, heads = (np.array([ends[k] for ends in found], dtype=np.int64) for k in range(2))
    return Steps(layouts, tails, heads, np.array(list(found.values())))


class _Move(NamedTuple):
    """A step from one layout to another, by their numbers. Of one over several axes there may be layouts ``between``:
    those where it has been taken over one of them.
    """

    before: int
    after: int
    step: Step
    between: tuple[int, ...]


def _falling(mesh: Mesh) -> frozenset[tuple[int, ...]]:
    """The axes, several together, along which ranks do not rise. Meshes that are equal may differ in that."""
    groups = (axes for count in range(2, mesh.ndim + 1) for axes in combinations(range(mesh.ndim), count))
    return frozenset(axes for axes in groups if not mesh.is_rising(axes))


@lru_cache(maxsize=KNOWN)
def _moves(layouts: tuple[Layout, ...], mesh: Mesh, falling: frozenset[tuple[int, ...]]) -> tuple[_Move, ...]:
    """All steps between layouts, those over few axes first, none that brings blocks over axes that are ``falling``.
    Programs of a model differ in prices alone, and tensors of many shapes have the same layouts.
    """
    index = {layout: i for i, layout in enumerate(layouts)}
    placements = sorted({placement for layout in layouts for placement in layout})
    found = []
    for count in range(1, mesh.ndim + 1):
        groups = list(combinations(range(mesh.ndim), count))
        for (before, i), axes, placement in product(index.items(), groups, placements):
            after = before.replace(axes, placement)
            step = step_on(before, after, axes) if after in index else None
            if step is None or (axes in falling and step.kind != "all_reduce"):
                continue
            between = (index.get(before.replace(axis, placement)) for axis in axes) if count > 1 else ()
            found.append(_Move(i, index[after], step, tuple(k for k in between if k is not None)))
    return tuple(found)


@lru_cache(maxsize=KNOWN)
def _sizes(
    layouts: tuple[Layout, ...], shape: tuple[int, ...], itemsize: int, mesh: Mesh, falling: frozenset[tuple[int, ...]]
) -> tuple[tuple[int, int], ...]:
    """Bytes that each of the moves sends, and that it copies."""
    return tuple(
        (
            size_bytes(move.step, layouts[move.before], shape, itemsize, mesh),
            copied_bytes(move.step, layouts[move.before], shape, itemsize, mesh),
        )
        for move in _moves(layouts, mesh, falling)
    )


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
