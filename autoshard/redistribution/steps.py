"""The steps by which a tensor gets from one layout to another, and the bytes that each of them moves.

A step changes the placement on one mesh axis, or on several at once, all of them alike and by one collective in the
groups of ranks that differ in these axes alone:

=================  ==============  =========================================================
change             step            size_bytes (the larger of a rank's input and output buffer)
=================  ==============  =========================================================
S(d) -> R          all_gather      the gathered shard
P    -> S(d)       reduce_scatter  the shard before
P    -> R          all_reduce      the shard
S(d) -> S(e)       all_to_all      the shard
R    -> S(d)       slice           nothing is sent; one axis only, as all-to-all
=================  ==============  =========================================================

Nothing becomes P: torch has no such redistribution, and no operator needs one. Where two axes cut one dim, only the
inner one, or both at once, can be gathered or cut anew. Uneven shards travel padded to the largest shard, so that every
rank moves the same bytes. A dim that is cut in parts moves as one that is not, with its blocks in another order; from
parts to no parts, or to others, there is no step, only a way through another dim or the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, zip_longest
from math import prod
from typing import Any, Literal

from cost_models.collective_kinds import RedistributionKind

from ..errors import LayoutError
from ..layout import Layout, largest_local_shape
from ..mesh import Mesh

StepKind = Literal[RedistributionKind, "slice"]


Banned = frozenset[tuple[str, int, int]]
"""Steps that may not be taken: kind, mesh axis, and the dim that is gathered or exchanged, -1 for any."""


@dataclass(frozen=True)
class Step:
    """One change of placement on mesh axes (rising); ``source`` and ``target`` are dims, -1 where there is none.

    ``source_parts`` and ``target_parts`` are the parts of these dims that are cut each, empty where one is cut whole.
    """

    kind: StepKind
    axes: tuple[int, ...]
    source: int = -1
    target: int = -1
    reduce: str = ""
    source_parts: tuple[int, ...] = ()
    target_parts: tuple[int, ...] = ()

    @property
    def packs(self) -> bool:
        """Whether the blocks that ranks are sent do not lie in a row: those of another dim than 0, or of parts."""
        return self.target > 0 or bool(self.target_parts)

    @property
    def joins(self) -> bool:
        """Whether the blocks that arrive do not lie as they are held, likewise."""
        return self.source > 0 or bool(self.source_parts)

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange anything."""
        return self.kind != "slice"


@lru_cache(maxsize=4096)
def step_between(before: Layout, after: Layout) -> Step:
    """The step that takes one layout to another.

    Raises:
        LayoutError: no single step leads there.
    """
    changed = tuple(i for i, (a, b) in enumerate(zip_longest(before, after)) if a != b)
    step = step_on(before, after, changed) if len(before) == len(after) else None
    if step is None:
        raise LayoutError(f"no single step takes {_text(before)} to {_text(after)}")
    return step


def steps_along(path: Sequence[Layout]) -> tuple[Step, ...]:
    """The steps between neighbours of a path of layouts.

    Raises:
        LayoutError: two neighbours are not one step apart.
    """
    return tuple(step_between(a, b) for a, b in pairwise(path))


def size_bytes(step: Step, before: Layout, shape: tuple[int, ...], itemsize: int, mesh: Mesh) -> int:
    """Bytes of the larger of a rank's input and output buffer, padding included; the same on every rank."""
    return int(buffer_bytes(step, largest_local_shape(shape, before, mesh), itemsize, mesh))


def buffer_bytes(step: Step, shard: Sequence[Any], itemsize: int, mesh: Mesh) -> Any:
    """The same where the largest shard is known, as its length along every dim: numbers, or arrays for many layouts."""
    local = list(shard)
    if not step.communicates:
        return 0 * prod(local)
    parts = mesh.parts(step.axes)
    if step.kind == "all_gather":
        local[step.source] = local[step.source] * parts
    elif step.target >= 0:
        for axis in step.axes:
            local[step.target] = -(-local[step.target] // mesh.shape[axis])
        local[step.target] = local[step.target] * parts
    return itemsize * prod(local)


def step_on(before: Layout, after: Layout, axes: tuple[int, ...]) -> Step | None:
    """The step that makes the placements on ``axes`` (rising) what they are in ``after``; None where there is none."""
    old, new = ({layout[axis] for axis in axes} for layout in (before, after))
    if len(old) != 1 or len(new) != 1 or old == new:
        return None
    (old_one,), (new_one,) = old, new
    inner = (before[axis] for axis in range(axes[0], len(before)) if axis not in axes)
    further_in = {placement.dim for placement in inner if placement.kind == "S"}
    if any(placement.kind == "S" and placement.dim in further_in for placement in (old_one, new_one)):
        return None
    match old_one.kind, new_one.kind:
        case "S", "R":
            return Step("all_gather", axes, source=old_one.dim, source_parts=old_one.parts)
        case "R", "S" if len(axes) == 1:
            return Step("slice", axes, target=new_one.dim, target_parts=new_one.parts)
        case "S", "S" if len(axes) == 1 and old_one.dim != new_one.dim:
            return Step("all_to_all", axes, old_one.dim, new_one.dim, "", old_one.parts, new_one.parts)
        case "P", "R":
            return Step("all_reduce", axes, reduce=old_one.reduce)
        case "P", "S":
            return Step("reduce_scatter", axes, target=new_one.dim, reduce=old_one.reduce, target_parts=new_one.parts)
    return None


def _text(layout: Layout) -> str:
    return f"({', '.join(map(str, layout))})"
