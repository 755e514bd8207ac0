"""The local form of an operator: what runs on one rank's shards.

For most operators it is the operator itself. Those that carry a size get the size of the rank's shard; a mean over a
cut dim adds up and divides by the whole length; a factory makes its block; a triangle starts where the block does; a
squeeze drops the dims that are 1 in the whole tensor, not those of which the rank has one index; the bias of a product
cut along the summed dim is added by one rank. The numeric check of the rules executes these forms and lowering emits
them.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch

from .capture import CONSTRAIN, Node, TensorMeta, map_refs
from .layout import Layout, local_range, local_shape
from .mesh import Mesh

aten = torch.ops.aten

VIEWS = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default})

# Operators whose argument at this position is the shape of the result.
_SIZE_ARGUMENT = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.reshape.default: 1,
    aten.expand.default: 1,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
    aten.new_zeros.default: 1,
    aten.new_ones.default: 1,
    aten.new_empty.default: 1,
    aten.new_empty_strided.default: 1,
    aten.new_full.default: 1,
    aten.zeros.default: 0,
    aten.ones.default: 0,
    aten.empty.memory_format: 0,
    aten.full.default: 0,
}
ARANGES = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})
_WANT_ROWS = frozenset({aten.view_as_complex.default, aten.view.dtype})  # whatever strides a shard has
_MEANS = frozenset({aten.mean.default, aten.mean.dim})
TRIANGLES = frozenset({aten.tril.default, aten.triu.default})
_SQUEEZES = frozenset(
    getattr(op, overload) for op in (aten.squeeze, aten.squeeze_copy) for overload in ("default", "dim", "dims")
)

# Operators that carry the length of the batch dim at this position; two more lengths follow.
GROUP_NORMS = {aten.native_group_norm.default: 3, aten.native_group_norm_backward.default: 5}

# Operators whose result is whatever the memory holds.
UNINITIALISED = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)

# Operators that make a tensor from nothing; each rank can make any block of it.
FACTORIES = frozenset({op for op, position in _SIZE_ARGUMENT.items() if position == 0} | ARANGES)


class Caller(Protocol):
    """What executes an operator: torch itself, or a graph under construction."""

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies a torch operator."""


def run_local(
    caller: Caller,
    node: Node,
    values: tuple[Any, ...],
    metas: tuple[TensorMeta, ...],
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout | None, ...],
    mesh: Mesh,
    coordinate: tuple[int, ...],
    device: torch.device | None = None,
) -> Any:
    """Runs an operator on one rank's shards.

    Args:
        values: the shard of each tensor argument, in argument order.
        metas: global shape and dtype of each tensor argument.
        inputs, outputs: the layouts of the strategy.
        device: replaces every device among the arguments.

    Returns:
        What the operator returns, on shards: one value, or a tuple where it has several results.
    """
    op = node.op
    if op is CONSTRAIN:  # nothing runs
        return values[0]
    supply = iter(values)
    args: tuple[Any, ...] = map_refs(node.args, lambda _: next(supply))
    kwargs = {key: map_refs(value, lambda _: next(supply)) for key, value in node.kwargs}
    if device is not None:
        kwargs = {key: device if isinstance(value, torch.device) else value for key, value in kwargs.items()}
    if op in _SIZE_ARGUMENT:
        args = _with_local_size(node, args, outputs, mesh, coordinate)
        if op is aten.new_empty_strided.default:  # strides are no part of a graph
            return caller.call(aten.new_empty.default, *args[:2], **kwargs)
        return caller.call(aten.reshape.default if op in VIEWS else op, *args, **kwargs)
    if op in ARANGES:
        meta, layout = node.outputs[0], outputs[0]
        assert meta is not None and layout is not None
        start, stop = local_range(meta.shape[0], layout, 0, mesh, coordinate)
        whole = caller.call(op, *args, **kwargs)
        return whole if stop - start == meta.shape[0] else caller.call(aten.slice.Tensor, whole, 0, start, stop)
    if op in _MEANS and (scale := _mean_length(node, metas[0], inputs[0])) is not None:
        total = aten.sum.default if op is aten.mean.default else aten.sum.dim_IntList
        return caller.call(aten.div.Scalar, caller.call(total, *args, **kwargs), scale)
    if op in _WANT_ROWS:
        return caller.call(op, caller.call(aten.contiguous.default, args[0]), *args[1:], **kwargs)
    if op in TRIANGLES:
        return caller.call(op, args[0], _local_diagonal(node, metas[0].shape, inputs[0], mesh, coordinate))
    if op in _SQUEEZES:
        return caller.call(aten.squeeze.dims, args[0], _squeezed_dims(node, metas[0].shape))
    if op in GROUP_NORMS:
        position = GROUP_NORMS[op]
        batch = local_shape(metas[0].shape, inputs[0], mesh, coordinate)[0]
        return caller.call(op, *args[:position], batch, *args[position + 1 :], **kwargs)
    if op is aten.addmm.default and _adds_elsewhere(inputs[0], outputs[0], coordinate):
        return caller.call(aten.mm.default, *args[1:])
    return caller.call(op, *args, **kwargs)


def is_free(node: Node) -> bool:
    """Whether an operator is a view: it moves and computes nothing."""
    assert node.op is not None
    alias = node.op._schema.returns[0].alias_info if node.op._schema.returns else None
    return node.op in (aten._unsafe_view.default, CONSTRAIN) or (alias is not None and not alias.is_write)


def _adds_elsewhere(bias: Layout, result: Layout | None, coordinate: tuple[int, ...]) -> bool:
    """Whether another rank adds the bias: where the result is addends and the bias whole, the first of an axis does."""
    assert result is not None
    return any(
        at > 0 and added.kind == "R" and partial.kind == "P" for at, added, partial in zip(coordinate, bias, result)
    )


def _with_local_size(
    node: Node, args: tuple[Any, ...], outputs: tuple[Layout | None, ...], mesh: Mesh, coordinate: tuple[int, ...]
) -> tuple[Any, ...]:
    meta, layout = node.outputs[0], outputs[0]
    assert meta is not None and layout is not None
    position = _SIZE_ARGUMENT[node.op]  # type: ignore[index]
    return (*args[:position], local_shape(meta.shape, layout, mesh, coordinate), *args[position + 1 :])


def _mean_length(node: Node, meta: TensorMeta, layout: Layout) -> int | None:
    """The number of elements a mean divides by, or None where every averaged dim is whole on each rank."""
    rank = len(meta.shape)
    dims = node.args[1] if node.op is aten.mean.dim and len(node.args) > 1 and node.args[1] else tuple(range(rank))
    averaged = {d % rank for d in dims} if rank else set()
    if not any(layout.axes_of(d) for d in averaged):
        return None
    return math.prod(meta.shape[d] for d in averaged)


def _local_diagonal(node: Node, shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> int:
    """The diagonal of the whole matrix as a diagonal of the rank's block, whose first element is (row, column)."""
    dims = len(shape) - 2, len(shape) - 1
    row, column = (local_range(shape[dim], layout, dim, mesh, coordinate)[0] for dim in dims)
    diagonal: int = node.args[1] if len(node.args) > 1 else dict(node.kwargs).get("diagonal", 0)
    return diagonal + row - column


def _squeezed_dims(node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
    dims = node.args[1] if len(node.args) > 1 else tuple(range(len(shape)))
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(dim for dim in dims if shape and shape[dim] == 1)
