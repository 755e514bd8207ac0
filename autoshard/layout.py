"""Layouts: how one tensor lies on a mesh, and the one text notation of it.

A :class:`Layout` has one :class:`Placement` per mesh axis:

``R``
    every rank along the axis holds the same values (replicated);
``S(d)``
    dim ``d`` is cut along the axis;
``P(sum)``
    every rank holds an addend; the tensor is their sum (also ``P(max)``, ``P(min)``).

Text: ``dp:S(0) tp:R``, one entry per axis. Where two axes cut one dim, the axis named first cuts first
(``dp:S(0) tp:S(0)``: blocks over dp, each cut again over tp); only the order of the mesh is supported.

Cuts follow ``torch.chunk`` (and so DTensor): ``n`` ranks cut a dim of ``L`` into blocks of ``ceil(L / n)``, the last
ones shorter or empty. Nested cuts apply the same rule to the block.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from .errors import LayoutError
from .mesh import Mesh

_PLACEMENT = r"(?:(?P<r>R)|S\((?P<dim>\d{1,3})\)|P\((?P<reduce>sum|max|min)\))"
_ENTRY = re.compile(r"(?P<axis>[A-Za-z_]\w*):" + _PLACEMENT)

Kind = Literal["R", "S", "P"]


@dataclass(frozen=True, order=True)
class Placement:
    """What one mesh axis does to a tensor: replicate (R), cut dim ``dim`` (S), or hold partial results (P)."""

    kind: Kind
    dim: int = -1
    reduce: str = ""

    def __str__(self) -> str:
        return {"R": "R", "S": f"S({self.dim})", "P": f"P({self.reduce})"}[self.kind]


R = Placement("R")
P_SUM = Placement("P", reduce="sum")


def S(dim: int) -> Placement:
    """The placement that cuts dim ``dim``."""
    return Placement("S", dim=dim)


def P(reduce: str) -> Placement:
    """The placement whose values are still to be combined by ``reduce`` (sum, max or min)."""
    return Placement("P", reduce=reduce)


@dataclass(frozen=True, order=True)
class Layout:
    """One placement per mesh axis, in mesh order."""

    placements: tuple[Placement, ...]

    def __iter__(self) -> Iterator[Placement]:
        return iter(self.placements)

    def __len__(self) -> int:
        return len(self.placements)

    def __getitem__(self, axis: int) -> Placement:
        return self.placements[axis]

    def replace(self, axes: int | tuple[int, ...], placement: Placement) -> Layout:
        """The same layout with another placement on one axis, or on several."""
        changed = list(self.placements)
        for axis in (axes,) if isinstance(axes, int) else axes:
            changed[axis] = placement
        return Layout(tuple(changed))

    @property
    def has_partial(self) -> bool:
        """Whether any axis holds partial results."""
        return any(p.kind == "P" for p in self.placements)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(p.kind == "R" for p in self.placements)

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """The mesh axes that cut ``dim``, outermost first."""
        return tuple(i for i, p in enumerate(self.placements) if p.kind == "S" and p.dim == dim)


def replicated(mesh: Mesh) -> Layout:
    """The layout in which every rank holds the whole tensor."""
    return Layout((R,) * mesh.ndim)


def parse_placement(text: str) -> Placement:
    """Reads ``R``, ``S(0)`` or ``P(sum)``; the inverse of ``str``.

    Raises:
        LayoutError: the text is none of these.
    """
    match = re.fullmatch(_PLACEMENT, text.strip())
    if match is None:
        raise LayoutError(f"cannot read the placement {text.strip()!r}; write R, S(dim) or P(sum)")
    return _placement(match)


def _placement(match: re.Match[str]) -> Placement:
    if match["dim"] is not None:
        return S(int(match["dim"]))
    return R if match["reduce"] is None else P(match["reduce"])


def parse_layout(text: str, mesh: Mesh) -> Layout:
    """Reads ``dp:S(0) tp:R``; the inverse of :func:`format_layout`. Axes left out are replicated.

    Raises:
        LayoutError: an entry cannot be read, names an unknown axis or one twice, or two axes cut one dim in another
            order than the mesh's.
    """
    placements = [R] * mesh.ndim
    named: list[int] = []
    for entry in text.split():
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise LayoutError(
                f"cannot read {entry!r} in the layout {text!r}; write axis:R, axis:S(dim) or axis:P(sum), "
                "for example dp:S(0) tp:R"
            )
        if match["axis"] not in mesh.axes:
            raise LayoutError(f"the layout {text!r} names axis {match['axis']!r}; the mesh {mesh} has no such axis")
        axis = mesh.index(match["axis"])
        if axis in named:
            raise LayoutError(f"the layout {text!r} names axis {match['axis']!r} twice")
        named.append(axis)
        placements[axis] = _placement(match)
    for i, first in enumerate(named):
        for second in named[i + 1 :]:
            if placements[first].kind == "S" and placements[first] == placements[second] and first > second:
                raise LayoutError(
                    f"the layout {text!r} cuts dim {placements[first].dim} over {mesh.axes[first]} before "
                    f"{mesh.axes[second]}; only the order of the mesh ({mesh}) is supported"
                )
    return Layout(tuple(placements))


def format_layout(layout: Layout, mesh: Mesh) -> str:
    """Writes ``dp:S(0) tp:R``, every axis named, in mesh order."""
    return " ".join(f"{axis}:{placement}" for axis, placement in zip(mesh.axes, layout.placements))


def format_strategy(inputs: Iterable[Layout], outputs: Iterable[Layout | None], mesh: Mesh) -> str:
    """Writes what an operator takes and gives: ``dp:S(0), dp:R -> dp:S(0), -``; ``-`` for a result that is no tensor.

    What has no inputs, such as a parameter, is written ``-> dp:R``.
    """
    taken = ", ".join(format_layout(layout, mesh) for layout in inputs)
    given = ", ".join("-" if layout is None else format_layout(layout, mesh) for layout in outputs)
    return f"{taken} -> {given}".strip()


def block(size: int, parts: int, index: int) -> tuple[int, int]:
    """``[start, stop)`` of block ``index`` when ``size`` is cut into ``parts``, as ``torch.chunk`` cuts.

    >>> [block(5, 4, i) for i in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    width = -(-size // parts)
    return min(index * width, size), min((index + 1) * width, size)


def local_range(size: int, layout: Layout, dim: int, mesh: Mesh, coordinate: tuple[int, ...]) -> tuple[int, int]:
    """``[start, stop)`` of a dim of length ``size`` that the rank at ``coordinate`` holds."""
    start, stop = 0, size
    for axis in layout.axes_of(dim):
        lo, hi = block(stop - start, mesh.shape[axis], coordinate[axis])
        start, stop = start + lo, start + hi
    return start, stop


def local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the shard that the rank at ``coordinate`` holds."""
    found = list(shape)
    for axis, placement in enumerate(layout.placements):
        if placement.kind == "S" and placement.dim < len(found):
            start, stop = block(found[placement.dim], mesh.shape[axis], coordinate[axis])
            found[placement.dim] = stop - start
    return tuple(found)


def largest_local_shape(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    """The shape of the largest shard; it is the one at coordinate (0, ..., 0)."""
    return local_shape(shape, layout, mesh, (0,) * mesh.ndim)


def check_fits(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> None:
    """Checks that a layout names only dims that the tensor has and one placement per axis.

    Raises:
        LayoutError: it does not.
    """
    if len(layout) != mesh.ndim:
        raise LayoutError(f"a layout on the mesh {mesh} needs {mesh.ndim} placements, got {len(layout)}")
    for axis, placement in zip(mesh.axes, layout.placements):
        if placement.kind == "S" and placement.dim >= len(shape):
            raise LayoutError(
                f"{axis}:{placement} cuts dim {placement.dim} of a tensor of shape {list(shape)}, "
                f"which has dims 0 to {len(shape) - 1}"
                if shape
                else f"{axis}:{placement} cuts a scalar"
            )


def has_empty_shard(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether some rank would hold no element along a cut dim. A tensor without elements is only ever replicated."""
    if 0 in shape:
        return not layout.is_replicated
    for dim, size in enumerate(shape):
        spans = [size]
        for axis in layout.axes_of(dim):
            parts = mesh.shape[axis]
            spans = [stop - start for span in spans for start, stop in (block(span, parts, i) for i in range(parts))]
        if min(spans) == 0:
            return True
    return False


def is_even(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether every rank holds a shard of the same shape."""
    for dim, size in enumerate(shape):
        for axis in layout.axes_of(dim):
            if size % mesh.shape[axis]:
                return False
            size //= mesh.shape[axis]
    return True


def uneven_axes(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> frozenset[int]:
    """The axes along which ranks hold shards of different shapes: of those that cut a dim, the first that does not
    divide what is left of it, and the ones after it.
    """
    found: set[int] = set()
    for dim, size in enumerate(shape):
        is_uneven = False
        for axis in layout.axes_of(dim):
            is_uneven |= size % mesh.shape[axis] != 0
            if is_uneven:
                found.add(axis)
            size //= mesh.shape[axis]
    return frozenset(found)
