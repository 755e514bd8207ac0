"""The links of a mesh: one per axis, and one per group of axes taken together.

A collective over an axis runs in groups of ranks that differ in this coordinate alone; over several axes, in groups of
ranks that differ in these. A group's ``Route`` says what it runs on: one link throughout (a flat ring, priced at its
slowest hop: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2),
2009), or level by level where its ranks form equal groups on a faster link. The cheaper of the two counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import overload

import numpy as np

from .amounts import Amount, Array
from .collectives import Levels, collective_s, leveled_s
from .errors import ProfileError
from .link import Link

MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Route:
    """The links that a group of ranks communicates over.

    Attributes:
        link: of every hop of a flat ring through the group.
        levels: (ranks, link) of each level, the fastest first, or empty; the ranks multiply to the group's.
        at_once: whether the levels have wires of their own, so that chunks of a buffer can be on all of them at a time.
    """

    link: Link
    levels: Levels = ()
    at_once: bool = False

    def collective_s(self, kind: str, ranks: int, size_bytes: Amount) -> Amount:
        """Seconds of one collective: flat or level by level, whichever is less."""
        flat = collective_s(kind, ranks, size_bytes, self.link)
        if not self.levels:
            return flat
        leveled = leveled_s(kind, size_bytes, self.levels, self.at_once)
        return np.minimum(flat, leveled) if isinstance(size_bytes, np.ndarray) else min(flat, leveled)


@dataclass(frozen=True)
class Topology:
    """What the axes of a mesh run on. Made by ``Profile.topology``.

    Attributes:
        routes: one per axis, in the order of the axes.
        flattened: of each group of two axes or more (their indices, rising) that a profile knows of.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    routes: tuple[Route, ...]
    flattened: Mapping[tuple[int, ...], Route] = field(default_factory=dict, hash=False)

    @property
    def links(self) -> tuple[Link, ...]:
        """The link of a flat ring over each axis."""
        return tuple(route.link for route in self.routes)

    @overload
    def collective_s(self, kind: str, axis: int | tuple[int, ...], size_bytes: float) -> float: ...
    @overload
    def collective_s(self, kind: str, axis: int | tuple[int, ...], size_bytes: Array) -> Array: ...
    def collective_s(self, kind: str, axis: int | tuple[int, ...], size_bytes: Amount) -> Amount:
        """Seconds of one collective over the mesh axis of index ``axis``, or over several axes as one group.

        ``size_bytes`` is the larger of a rank's input and output buffer: of an all-gather the gathered output, of a
        reduce-scatter the input, of the others the buffer. An array of sizes gives an array of seconds. The formula is
        that of :mod:`cost_models.collectives`.

        Raises:
            ValueError: an unknown kind, no such axis, or a size that is negative or not finite.
        """
        group = tuple(sorted(axis)) if isinstance(axis, tuple) else (axis,)
        if not group or len(set(group)) < len(group) or not all(0 <= i < len(self.axes) for i in group):
            raise ValueError(f"no mesh axis of index {axis!r}; the mesh has {len(self.axes)}: {', '.join(self.axes)}")
        ranks = math.prod(self.shape[i] for i in group)
        route = self.routes[group[0]] if len(group) == 1 else self.flattened[group]
        return route.collective_s(kind, ranks, size_bytes)


def groups_of(ranks: Array, axes: Sequence[int]) -> Array:
    """The groups that a collective over ``axes`` runs in, (groups, members); ``ranks`` has the shape of the mesh."""
    last = range(ranks.ndim - len(axes), ranks.ndim)
    moved = np.moveaxis(ranks, axes, last)
    return moved.reshape(-1, math.prod(ranks.shape[axis] for axis in axes))


def axis_groups(ndim: int) -> list[tuple[int, ...]]:
    """Every group of two axes or more, as rising indices."""
    return [group for size in range(2, ndim + 1) for group in combinations(range(ndim), size)]


def mesh_ranks(axes: tuple[str, ...], shape: tuple[int, ...], ranks: Sequence[int] | None) -> Array:
    """The rank at each position of a mesh, in its shape; counted with the last axis fastest where ``ranks`` is None.

    Raises:
        ProfileError: the axes are malformed, or ``ranks`` does not name every rank once.
    """
    if not axes or len(axes) != len(shape):
        raise ProfileError(f"a mesh needs one size per axis, got axes {axes} and sizes {shape}")
    if any(size < 1 for size in shape):
        raise ProfileError(f"every axis of a mesh has a size of at least 1, got {mesh_text(axes, shape)}")
    size = math.prod(shape)
    if size > MAX_RANKS:
        raise ProfileError(f"the mesh {mesh_text(axes, shape)} has {size} ranks; the limit is {MAX_RANKS}")
    order = np.arange(size) if ranks is None else np.asarray(ranks).reshape(-1)
    if not np.array_equal(np.sort(order), np.arange(size)):
        raise ProfileError(f"the order of ranks must name each of the {size} ranks of {mesh_text(axes, shape)} once")
    return order.reshape(shape)


def mesh_text(axes: Sequence[str], shape: Sequence[int]) -> str:
    """``dp=2,tp=4``."""
    return ",".join(f"{axis}={size}" for axis, size in zip(axes, shape))
