"""The steps by which a tensor gets from one layout to another, and the bytes that each of them moves.

A step changes the placement on one mesh axis:

=================  ==============  =========================================================
change             step            size_bytes (the larger of a rank's input and output buffer)
=================  ==============  =========================================================
S(d) -> R          all_gather      the gathered shard
P    -> S(d)       reduce_scatter  the shard before
P    -> R          all_reduce      the shard
S(d) -> S(e)       all_to_all      the shard
R    -> S(d)       slice           nothing is sent
=================  ==============  =========================================================

Nothing becomes P: torch has no such redistribution, and no operator needs one. Where two axes cut one dim, only the
inner one can be gathered or cut anew. Uneven shards travel padded to the largest shard, so that every rank moves the
same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import prod
from typing import Literal

from cost_models.collective_kinds import RedistributionKind

from ..errors import LayoutError
from ..layout import Layout, R, largest_local_shape
from ..mesh import Mesh

StepKind = Literal[RedistributionKind, "slice"]


Banned = frozenset[tuple[str, int, int]]
"""Steps that may not be taken: kind, mesh axis, and the dim that is gathered or exchanged, -1 for any."""


@dataclass(frozen=True)
class Step:
    """One change of placement on one mesh axis; ``source`` and ``target`` are dims, -1 where there is none."""

    kind: StepKind
    axis: int
    source: int = -1
    target: int = -1
    reduce: str = ""

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange anything."""
        return self.kind != "slice"


def step_between(before: Layout, after: Layout) -> Step:
    """The step that takes one layout to another.

    Raises:
        LayoutError: the two do not differ in exactly one placement, or no single step leads there.
    """
    changed = [i for i, (a, b) in enumerate(zip_longest(before, after)) if a != b]
    step = step_on(before, after, changed[0]) if len(changed) == 1 else None
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
    if not step.communicates:
        return 0
    local = list(largest_local_shape(shape, before, mesh))
    parts = mesh.shape[step.axis]
    if step.kind == "all_gather":
        local[step.source] *= parts
    elif step.target >= 0:
        local[step.target] = -(-local[step.target] // parts) * parts
    return itemsize * prod(local)


def step_on(before: Layout, after: Layout, axis: int) -> Step | None:
    """The step that makes the placement on one axis what it is in ``after``; None where there is none."""
    old, new = before[axis], after[axis]
    others = before.replace(axis, R)
    if old == new or (old.kind == "S" and any(i > axis for i in others.axes_of(old.dim))):
        return None
    if new.kind == "S" and any(i > axis for i in others.axes_of(new.dim)):
        return None
    match old.kind, new.kind:
        case "S", "R":
            return Step("all_gather", axis, source=old.dim)
        case "R", "S":
            return Step("slice", axis, target=new.dim)
        case "S", "S":
            return Step("all_to_all", axis, source=old.dim, target=new.dim)
        case "P", "R":
            return Step("all_reduce", axis, reduce=old.reduce)
        case "P", "S":
            return Step("reduce_scatter", axis, target=new.dim, reduce=old.reduce)
    return None


def _text(layout: Layout) -> str:
    return f"({', '.join(map(str, layout))})"
