"""Operators that read or write where an index says: rows of a table, elements along a dim.

The dim that the indices are of can be cut: a rank has a block of it, finds what lies in its block, and gives zeros for
the rest, so that what the ranks give adds up; written is what lies in its block alone. So the rows of an embedding are
cut over the vocabulary. M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..capture import Node
from ..layout import P_SUM, R, S, local_range
from .operator import LocalCall, Metas, Operator, enter
from .rule import Rule

aten = torch.ops.aten


def _rows_cut(node: Node, inputs: Metas) -> list[Rule]:
    return [Rule((S(0), R), (P_SUM,))]


def _gradient_rows_cut(node: Node, inputs: Metas) -> list[Rule]:
    return [Rule((R, R), (S(0),))]


def _rows_of_block(call: LocalCall) -> Any:
    """Looks up the rows that the rank has, zeros in the place of the others."""
    rows = call.metas[0].shape[0]
    start, stop = local_range(rows, call.inputs[0], 0, call.mesh, call.coordinate)
    if stop - start == rows:
        return call.run(call.node.op, *call.args, **call.kwargs)
    table, indices = call.args[:2]
    outside, within = _within(call, indices, start, stop)
    found = call.run(aten.embedding.default, table, within)
    return call.run(aten.masked_fill_.Scalar, found, call.run(aten.unsqueeze.default, outside, -1), 0.0)


def _gradient_of_block(call: LocalCall) -> Any:
    """Adds up what reached the rank's rows. What reached others, or the padding, goes to one row more, that is cut off:
    that is torch's padding then, which it leaves out.
    """
    result, layout = call.node.outputs[0], call.outputs[0]
    assert result is not None and layout is not None
    rows = result.shape[0]
    start, stop = local_range(rows, layout, 0, call.mesh, call.coordinate)
    if stop - start == rows:
        return call.run(call.node.op, *call.args)
    gradient, indices, _, padding, by_frequency = call.args
    nowhere = stop - start
    outside, shifted = _outside(call, indices, start, stop)
    if start <= padding < stop:
        outside = call.run(aten.logical_or.default, outside, call.run(aten.eq.Scalar, shifted, padding - start))
    within = call.run(aten.masked_fill.Scalar, shifted, outside, nowhere)
    found = call.run(aten.embedding_dense_backward.default, gradient, within, nowhere + 1, nowhere, by_frequency)
    return call.run(aten.slice.Tensor, found, 0, 0, nowhere)


def _elements_cut(node: Node, inputs: Metas) -> list[Rule]:
    """Elements of the rank's block, zeros in the place of the others."""
    return [Rule((S(_dim(node, inputs)), R), (P_SUM,))]


def _elements_of_block(call: LocalCall) -> Any:
    block = _block(call)
    if block is None:
        return call.run(call.node.op, *call.args, **call.kwargs)
    x, dim, indices = call.args[:3]
    outside, within = _within(call, indices, *block)
    found = call.run(aten.gather.default, x, dim, within)
    return call.run(aten.masked_fill_.Scalar, found, outside, 0.0 if call.metas[0].dtype.is_floating_point else 0)


def _added_to_block(call: LocalCall) -> Any:
    """Adds what reaches the rank's block; zero where something reaches another."""
    block = _block(call)
    if block is None:
        return call.run(call.node.op, *call.args)
    x, dim, indices, added = call.args
    outside, within = _within(call, indices, *block)
    return call.run(call.node.op, x, dim, within, call.run(aten.masked_fill.Scalar, added, outside, 0))


def _added_cut(node: Node, inputs: Metas) -> list[Rule]:
    """The result is cut along the dim that indices are of, or they are: then ranks have addends of it. Where indices
    are shorter than what is added, the rest of that is left out, so that blocks of both do not belong together.
    """
    _, index, added = inputs
    dim = _dim(node, inputs)
    rules = [Rule((S(dim), R, R), (S(dim),)), Rule((P_SUM, R, P_SUM), (P_SUM,))]
    if added.shape and index.shape[dim] == added.shape[dim]:
        rules.append(Rule((P_SUM, S(dim), S(dim)), (P_SUM,)))
    return rules


def _put_cut(node: Node, inputs: Metas) -> list[Rule]:
    """Other dims; and where one element of each row is written, its own: of several, two could be written where a rank
    writes none.
    """
    dim = _dim(node, inputs)
    rules = [Rule((S(d),) * len(inputs), (S(d),)) for d in range(len(inputs[0].shape)) if d != dim]
    if inputs[1].shape[dim : dim + 1] == (1,):
        rules.append(Rule((S(dim), *(R,) * (len(inputs) - 1)), (S(dim),)))
    return rules


def _put_into_block(call: LocalCall) -> Any:
    """Writes what lies in the rank's block; what lies in another is written as it is."""
    block = _block(call)
    if block is None:
        return call.run(call.node.op, *call.args)
    x, dim, indices, written = call.args
    outside, within = _within(call, indices, *block)
    there = call.run(aten.gather.default, x, dim, within)
    if len(call.metas) == 3:
        new = call.run(aten.where.self, outside, there, written)
    else:
        new = call.run(aten.masked_fill.Scalar, there, call.run(aten.logical_not.default, outside), written)
    return call.run(aten.scatter.src, x, dim, within, new)


def _picked_cut(node: Node, inputs: Metas) -> list[Rule]:
    """Rows are cut with what is picked of them, and the dim that it is picked along by itself."""
    dim, rank = node.args[2], len(inputs[0].shape)
    rows = [Rule((S(d), S(d)), (S(d),)) for d in range(rank) if d != dim]
    return [*rows, Rule((R, R), (S(dim),)), Rule((P_SUM, R), (P_SUM,))]


def _picked_in_block(call: LocalCall) -> Any:
    """Puts in its place what lies in the rank's block; zero where something lies in another."""
    gradient, indices, dim, length = call.args
    layout = call.outputs[0]
    assert layout is not None
    start, stop = local_range(length, layout, dim, call.mesh, call.coordinate)
    if stop - start == length:
        return call.run(call.node.op, *call.args)
    if stop == start:
        return call.run(aten.slice.Tensor, gradient, dim, 0, 0)
    outside, within = _within(call, indices, start, stop)
    return call.run(call.node.op, call.run(aten.masked_fill.Scalar, gradient, outside, 0.0), within, dim, stop - start)


def _dim(node: Node, inputs: Metas) -> int:
    found: int = node.args[1]
    return found % max(1, len(inputs[0].shape))


def _block(call: LocalCall) -> tuple[int, int] | None:
    """The rank's block of the dim that indices are of; None where it has all of it."""
    dim = _dim(call.node, call.metas)
    shape = call.metas[0].shape
    if not call.inputs[0].axes_of(dim):
        return None
    return local_range(shape[dim], call.inputs[0], dim, call.mesh, call.coordinate)


def _within(call: LocalCall, indices: Any, start: int, stop: int) -> tuple[Any, Any]:
    """Which indices are none of the rank's block, and their place in the block, 0 for these."""
    outside, shifted = _outside(call, indices, start, stop)
    return outside, call.run(aten.masked_fill.Scalar, shifted, outside, 0)


def _outside(call: LocalCall, indices: Any, start: int, stop: int) -> tuple[Any, Any]:
    """Which indices are none of the rank's block, and how far each is behind its start."""
    shifted = call.run(aten.sub.Tensor, indices, start)
    below, above = call.run(aten.lt.Scalar, indices, start), call.run(aten.ge.Scalar, indices, stop)
    return call.run(aten.logical_or.default, below, above), shifted


def _every_row(length: int, indices: torch.Tensor) -> torch.Tensor:
    """Indices of a dim in turn, from where each of some random ones stands: every block is read."""
    return (indices + torch.arange(indices.numel()).reshape(indices.shape)) % length


def _with_every_row(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return values[0], _every_row(values[0].shape[0], values[1])


def _with_every_place(length_at: int, node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Of an operator that is told the length of the dim that indices are of, by an argument at a position."""
    return values[0], _every_row(node.args[length_at], values[1])


def _with_every_element(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    dim = node.args[1] % max(1, values[0].dim())
    length = values[0].shape[dim] if values[0].dim() else 1
    return values[0], (values[1] + torch.arange(values[1].numel()).reshape(values[1].shape)) % length, *values[2:]


def _passes_of_rows(node: Node, inputs: Metas, layouts: tuple[Any, ...]) -> float:
    """What is looked up of a block is read and written again, as zeros are put into it."""
    return 2.0 if layouts[0].axes_of(0) else 1.0


enter(
    "embedding",
    Operator(
        more_rules=_rows_cut,
        local=_rows_of_block,
        meant=_with_every_row,
        passes=_passes_of_rows,
        kernel="indexing",
        traits=("rows",),
    ),
)
enter(
    "embedding_dense_backward",
    Operator(
        more_rules=_gradient_rows_cut,
        local=_gradient_of_block,
        meant=partial(_with_every_place, 2),
        kernel="indexing",
    ),
)
enter(
    "gather",
    Operator(
        more_rules=_elements_cut,
        local=_elements_of_block,
        meant=_with_every_element,
        kernel="indexing",
        traits=("rows",),
    ),
)
enter(
    "scatter_add",
    Operator(more_rules=_added_cut, local=_added_to_block, meant=_with_every_element, kernel="indexing"),
)
enter(
    "scatter.value scatter.src",
    Operator(more_rules=_put_cut, local=_put_into_block, meant=_with_every_element, kernel="indexing"),
)
enter(
    "gather_backward",
    Operator(rules=_picked_cut, local=_picked_in_block, meant=partial(_with_every_place, 3), kernel="indexing"),
    namespace="autoshard",
)
