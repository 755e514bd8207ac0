"""Layouts: how one tensor lies on a mesh, and the one text notation of it.

A :class:`Layout` has one :class:`Placement` per mesh axis:

``R``
    every rank along the axis holds the same values (replicated);
``S(d)``
    dim ``d`` is cut along the axis;
``P(sum)``
    every rank holds an addend; the tensor is their sum (also ``P(max)``, ``P(min)``);
``S(d/3)``, ``S(d/4:1:1)``
    dim ``d`` has three equal parts, or three whose lengths are as 4 to 1 to 1, and each of them is cut: a rank holds
    its block of every part, one behind the other. So are the columns of queries, keys and values of one projection cut
    by heads.

Text: ``dp:S(0) tp:R``, one entry per axis. Where two axes cut one dim, the axis named first cuts first
(``dp:S(0) tp:S(0)``: blocks over dp, each cut again over tp); only the order of the mesh is supported.

Cuts follow ``torch.chunk`` (and so DTensor): ``n`` ranks cut a dim of ``L`` into blocks of ``ceil(L / n)``, the last
ones shorter or empty. Nested cuts apply the same rule to the block. Parts are only ever cut evenly, so that shards have
the sizes that they have without parts. All axes that cut a dim in parts cut it in the same ones; outer axes may cut it
as one before, and then the parts are those of their block (``dp:S(0) cp:S(0/4)``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import gcd, prod
from typing import Literal, NamedTuple

from cost_models.spelling import did_you_mean

from .errors import LayoutError
from .mesh import Mesh

_PLACEMENT = r"(?:(?P<r>R)|S\((?P<dim>\d{1,3})(?:/(?P<parts>\d{1,9}(?::\d{1,9})*))?\)|P\((?P<reduce>sum|max|min)\))"
_ENTRY = re.compile(r"(?P<axis>[A-Za-z_]\w*):" + _PLACEMENT)

Kind = Literal["R", "S", "P"]

MOST_PARTS = 64
"""Parts of a dim that a layout can name."""


class Placement(NamedTuple):
    """What one mesh axis does to a tensor: replicate (R), cut dim ``dim`` (S), or hold partial results (P).

    ``parts`` are the lengths of the parts of the dim that are cut each, in lowest terms: (1, 1, 1) are equal thirds.
    Empty where the dim is cut as one.
    """

    kind: Kind
    dim: int = -1
    reduce: str = ""
    parts: tuple[int, ...] = ()

    def __str__(self) -> str:
        return {"R": "R", "S": f"S({self.dim}{self._parts_text()})", "P": f"P({self.reduce})"}[self.kind]

    def _parts_text(self) -> str:
        if not self.parts:
            return ""
        return f"/{len(self.parts)}" if set(self.parts) == {1} else f"/{':'.join(map(str, self.parts))}"


R = Placement("R")
P_SUM = Placement("P", reduce="sum")


def S(dim: int, parts: tuple[int, ...] = ()) -> Placement:
    """The placement that cuts dim ``dim``, or each of its parts, whose lengths are as these numbers; 0 is none.

    >>> str(S(1)), str(S(1, (768, 768, 768))), str(S(1, (4096, 1024, 1024))), str(S(1, (0, 4096)))
    ('S(1)', 'S(1/3)', 'S(1/4:1:1)', 'S(1)')
    """
    parts = tuple(filter(None, parts))
    shared = gcd(*parts)
    return Placement("S", dim=dim, parts=tuple(part // shared for part in parts) if len(parts) > 1 else ())


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
    def has_parts(self) -> bool:
        """Whether any axis cuts the parts of a dim, each by itself."""
        return any(p.parts for p in self.placements)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(p.kind == "R" for p in self.placements)

    def axes_of(self, dim: int) -> tuple[int, ...]:
        """The mesh axes that cut ``dim``, outermost first."""
        return tuple(i for i, p in enumerate(self.placements) if p.kind == "S" and p.dim == dim)

    def parts_of(self, dim: int) -> tuple[int, ...]:
        """The parts of ``dim`` that are cut each; empty where it is cut as one, or whole."""
        return next((p.parts for p in reversed(self.placements) if p.kind == "S" and p.dim == dim), ())

    def outer_axes_of(self, dim: int) -> tuple[int, ...]:
        """Of the axes that cut ``dim`` those that cut it as one, before others cut the parts of their blocks."""
        is_in_parts = bool(self.parts_of(dim))
        return tuple(axis for axis in self.axes_of(dim) if is_in_parts and not self[axis].parts)


def replicated(mesh: Mesh) -> Layout:
    """The layout in which every rank holds the whole tensor."""
    return Layout((R,) * mesh.ndim)


def parse_placement(text: str) -> Placement:
    """Reads ``R``, ``S(0)``, ``S(0/3)`` or ``P(sum)``; the inverse of ``str``.

    Raises:
        LayoutError: the text is none of these.
    """
    match = re.fullmatch(_PLACEMENT, text.strip())
    if match is None:
        raise LayoutError(f"cannot read the placement {text.strip()!r}; write R, S(dim) or P(sum)")
    return _placement(match)


def _placement(match: re.Match[str]) -> Placement:
    if match["dim"] is not None:
        return S(int(match["dim"]), _parts(match["parts"]))
    return R if match["reduce"] is None else P(match["reduce"])


def _parts(text: str | None) -> tuple[int, ...]:
    """``3`` is three equal parts, ``4:1:1`` three whose lengths are as these."""
    if text is None:
        return ()
    lengths = tuple(map(int, text.split(":")))
    found = (1,) * lengths[0] if len(lengths) == 1 and lengths[0] <= MOST_PARTS else lengths
    if not 1 < len(found) <= MOST_PARTS or 0 in found:
        raise LayoutError(
            f"cannot read the parts {text!r} of a dim; write S(1/3) for three equal ones, or S(1/4:1:1) for three of "
            f"these proportions, at most {MOST_PARTS}"
        )
    return found


def parse_layout(text: str, mesh: Mesh) -> Layout:
    """Reads ``dp:S(0) tp:R``; the inverse of :func:`format_layout`. Axes left out are replicated.

    Raises:
        LayoutError: an entry cannot be read, names an unknown axis or one twice, or two axes cut one dim in another
            order than the mesh's, or in other parts.
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
            raise LayoutError(
                f"the layout {text!r} names axis {match['axis']!r}; the mesh {mesh} has no such axis"
                f"{did_you_mean(match['axis'], mesh.axes)}"
            )
        axis = mesh.index(match["axis"])
        if axis in named:
            raise LayoutError(f"the layout {text!r} names axis {match['axis']!r} twice")
        named.append(axis)
        placements[axis] = _placement(match)
    for i, first in enumerate(named):
        for second in named[i + 1 :]:
            a, b = placements[first], placements[second]
            if a.kind != "S" or b.kind != "S" or a.dim != b.dim:
                continue
            if a.parts != b.parts and a.parts:
                raise LayoutError(
                    f"the layout {text!r} cuts dim {a.dim} as {a} and as {b}; axes that cut one dim cut the same "
                    "parts, but for outer ones that cut it as one"
                )
            if first > second:
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


def pieces(size: int, parts: tuple[int, ...]) -> list[tuple[int, int]]:
    """``[start, stop)`` of each part of a dim of length ``size``, which is one where there are no parts.

    >>> pieces(12, (4, 1, 1)), pieces(12, ())
    ([(0, 8), (8, 10), (10, 12)], [(0, 12)])
    """
    ends = list(accumulate(parts or (1,), initial=0))
    return [(size * start // ends[-1], size * stop // ends[-1]) for start, stop in pairwise(ends)]


def local_ranges(size: int, layout: Layout, dim: int, mesh: Mesh, coordinate: tuple[int, ...]) -> list[tuple[int, int]]:
    """``[start, stop)`` of each part of a dim of length ``size`` that the rank at ``coordinate`` holds, in the order in
    which it holds them.
    """
    outer, found, first, last = layout.outer_axes_of(dim), [], 0, size
    for axis in outer:
        lo, hi = block(last - first, mesh.shape[axis], coordinate[axis])
        first, last = first + lo, first + hi
    for begin, end in pieces(last - first, layout.parts_of(dim)):
        start, stop = first + begin, first + end
        for axis in layout.axes_of(dim)[len(outer) :]:
            lo, hi = block(stop - start, mesh.shape[axis], coordinate[axis])
            start, stop = start + lo, start + hi
        found.append((start, stop))
    return found


def local_range(size: int, layout: Layout, dim: int, mesh: Mesh, coordinate: tuple[int, ...]) -> tuple[int, int]:
    """``[start, stop)`` of a dim of length ``size`` that the rank at ``coordinate`` holds.

    Raises:
        LayoutError: it holds several ranges, as the dim is cut in parts.
    """
    found = local_ranges(size, layout, dim, mesh, coordinate)
    if len(found) > 1:
        raise LayoutError(f"dim {dim} is cut in {len(found)} parts, of which a rank holds no single range")
    return found[0]


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


def batch_dim_of(shape: tuple[int, ...], batch: int | None, dim: int) -> int | None:
    """The dim of a tensor that is the batch of that size: ``dim``, or 0, where that is as long; None of any other."""
    return next((each for each in (dim, 0) if shape[each : each + 1] == (batch,)), None)


def check_fits(layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> None:
    """Checks that a layout names only dims that the tensor has and one placement per axis, and cuts parts evenly.

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
    if not cuts_parts_evenly(shape, layout, mesh):
        raise LayoutError(
            f"the layout {format_layout(layout, mesh)} cuts parts of a dim of a tensor of shape {list(shape)}; all "
            "axes that cut the dim must cut the same parts, and into equal blocks"
        )


def has_empty_shard(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether some rank would hold nothing of a dim that is cut. A tensor without elements is cut along others."""
    for dim, size in enumerate(shape):
        spans = [size]
        for axis in layout.axes_of(dim):
            parts = mesh.shape[axis]
            spans = [stop - start for span in spans for start, stop in (block(span, parts, i) for i in range(parts))]
        if min(spans) == 0 and layout.axes_of(dim):
            return True
    return False


def cuts_parts_evenly(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether the dims that are cut in parts have these, each cut into equal blocks, by all axes that cut the dim but
    outer ones, which cut it into equal blocks as one.
    """
    for dim in {placement.dim for placement in layout if placement.parts}:
        parts, outer = layout.parts_of(dim), layout.outer_axes_of(dim)
        axes = layout.axes_of(dim)[len(outer) :]
        if any(layout[axis].parts != parts for axis in axes):
            return False
        length, uneven = divmod(shape[dim], prod(mesh.shape[axis] for axis in outer))
        unit, rest = divmod(length, sum(parts))
        ranks = prod(mesh.shape[axis] for axis in axes)
        if uneven or rest or any(unit * part % ranks for part in parts):
            return False
    return True


def is_possible(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether a tensor of a shape can be held in a layout: every rank holds elements, and parts are cut evenly."""
    return cuts_parts_evenly(shape, layout, mesh) and not has_empty_shard(shape, layout, mesh)


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
