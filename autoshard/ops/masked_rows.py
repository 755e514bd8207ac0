"""Elements that a mask picks, which take their numbers from a source one after the other: features of pictures in the
places of their tokens. Cut along the batch, where the source belongs to its rows, and along what no mask tells apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..capture import Node
from ..capture.operators.filled_rows import filled_rows
from ..layout import P_SUM, Placement, R, S
from .local import with_local_size
from .operator import LocalCall, Metas, Operator, Shape, enter
from .rule import Rule

aten = torch.ops.aten


def _cuts(x: Shape, mask: Shape, source: Shape) -> Iterator[tuple[int, Placement, int]]:
    """The dims along which x, its mask and the source are cut together: that of x, how the mask is cut then, and that
    of the source. Numbers of the source come in row-major order, so that part of it belongs to some rows only along the
    first dim, of both, that has more than one index. Behind the last dim that the mask has, both may end alike.
    """
    missing, rows, first = len(x) - len(mask), _first(x), _first(source)
    if missing <= rows < len(x) and first < len(source) and mask[rows - missing] == x[rows]:
        if source[first] % x[rows] == 0 and math.prod(source) % (x[rows] * _each(x, mask)) == 0:
            yield rows, S(rows - missing), first
    behind = missing + max((d + 1 for d, size in enumerate(mask) if size > 1), default=0)
    kept = len(x) - behind
    if kept < len(source) and source[len(source) - kept :] == x[behind:]:
        yield from ((d, R, d - len(x) + len(source)) for d in range(behind, len(x)))


def _first(shape: Sequence[int]) -> int:
    """The first dim that has more than one index; the number of dims where none has."""
    return next((d for d, size in enumerate(shape) if size != 1), len(shape))


def _shapes(node: Node, inputs: Metas) -> tuple[Shape, Shape, Shape]:
    """Those of x (or of its gradient), of the mask and of the source."""
    source = inputs[2] if len(inputs) == 3 else node.outputs[0]
    assert source is not None
    return inputs[0].shape, inputs[1].shape, source.shape


def _writing(node: Node, inputs: Metas) -> list[Rule]:
    made = node.outputs[0]
    if made is None or made.shape != inputs[0].shape:
        return []
    cut = [Rule((S(d), of_mask, S(there)), (S(d),)) for d, of_mask, there in _cuts(*_shapes(node, inputs))]
    return [Rule((P_SUM, R, P_SUM), (P_SUM,)), *cut]


def _picking(node: Node, inputs: Metas) -> list[Rule]:
    cut = [Rule((S(d), of_mask), (S(there),)) for d, of_mask, there in _cuts(*_shapes(node, inputs))]
    return [Rule((P_SUM, R), (P_SUM,)), *cut]


def _written(call: LocalCall) -> Any:
    """Where rows are cut, they are checked to take exactly what the rank has of the source."""
    rows = _first(call.metas[0].shape)
    are_cut = any(placement == S(rows) for placement in call.inputs[0].placements)
    return call.run(filled_rows if are_cut else call.node.op, *call.args)


def _small(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    """A source for each row, of as few numbers as one place of the mask takes."""
    _, _, source = _shapes(node, inputs)
    x, mask = shapes[:2]
    small, first = [1] * len(source), _first(source)
    for d, of_mask, there in _cuts(*_shapes(node, inputs)):
        small[there] = x[d] if of_mask == R or there != first else small[there]
    if first < len(small):
        small[first] *= math.lcm(_each(x, mask), math.prod(small)) // math.prod(small) * _rows(x, mask)
    shapes[2:] = [small] * len(shapes[2:])
    return node.args if len(shapes) == 3 else (*node.args[:2], tuple(small))


def _each(x: Sequence[int], mask: Sequence[int]) -> int:
    """The elements that one place of the mask picks."""
    return math.prod(x) // max(math.prod(mask), 1)


def _rows(x: Sequence[int], mask: Sequence[int]) -> int:
    """The rows that a mask tells apart."""
    rows = _first(x) - len(x) + len(mask)
    return mask[rows] if 0 <= rows < len(mask) else 1


def _as_many_in_each_row(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A mask that takes the same part of the source in every row."""
    x, mask, *source = values
    size = source[0].numel() if source else math.prod(node.args[2])
    rows = _rows(x.shape, mask.shape)
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(rows, mask.numel() // rows, generator=generator).argsort(1)
    picks = order < size // (rows * _each(x.shape, mask.shape))
    return x, picks.view(mask.shape), *source


def _picked_of_rows(node: Node, inputs: Metas) -> list[Rule]:
    """Rows with their mask, where of each as much is picked; and what stands behind the places of the mask."""
    x, mask = (len(meta.shape) for meta in inputs)
    rows = [Rule((S(0), S(0)), (S(0),))] if node.args[3] else []
    return [*rows, Rule((P_SUM, R), (P_SUM,)), *(Rule((S(d), R), (S(d - mask + 2),)) for d in range(mask, x))]


def _put_back_of_rows(node: Node, inputs: Metas) -> list[Rule]:
    """The same of the gradient."""
    gradient, mask = (len(meta.shape) for meta in inputs)
    rows = [Rule((S(0), S(0)), (S(0),))] if node.args[2] else []
    return [*rows, Rule((P_SUM, R), (P_SUM,)), *(Rule((S(d), R), (S(d + mask - 2),)) for d in range(2, gradient))]


def _picked_here(call: LocalCall) -> Any:
    """As many of each of the rank's rows, or of all; with the line of the model, for the error."""
    return call.run(call.node.op, *call.args, call.node.source)


def _small_pick(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    """Of half of the places of each row, of all where it is of all, of none where it is of none."""
    is_backward = len(node.args) == 3
    of_rows = node.args[2 if is_backward else 3]
    each = inputs[0].shape[1] if is_backward else node.args[2]
    whole, few = (math.prod(mask[1:] if of_rows else mask) for mask in (inputs[1].shape, shapes[1]))
    small = few if each == whole else max(1, few // 2) if each else 0
    if is_backward:
        shapes[0][:2] = [shapes[1][0] if of_rows else 1, small]
        return node.args
    return (*node.args[:2], small, of_rows)


def _masks_as_said(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A mask that picks as many of each row as the operator says, or of all."""
    x, mask = values
    of_rows, each = (node.args[3], node.args[2]) if len(node.args) == 4 else (node.args[2], x.shape[1])
    rows = mask.shape[0] if of_rows else 1
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(rows, mask.numel() // max(rows, 1), generator=generator).argsort(1).argsort(1)
    return x, (order < each).view(mask.shape)


enter(
    "pick",
    Operator(
        rules=_picked_of_rows,
        local=_picked_here,
        small=_small_pick,
        meant=_masks_as_said,
        kernel="indexing",
        traits=("rows",),
    ),
    namespace="autoshard",
)
enter(
    "pick_backward",
    Operator(rules=_put_back_of_rows, small=_small_pick, meant=_masks_as_said, kernel="indexing"),
    namespace="autoshard",
)
enter(
    "masked_scatter",
    Operator(rules=_writing, local=_written, small=_small, meant=_as_many_in_each_row, kernel="indexing"),
)
enter(
    "masked_scatter_backward",
    Operator(rules=_picking, local=with_local_size(2), small=_small, meant=_as_many_in_each_row, kernel="indexing"),
)
