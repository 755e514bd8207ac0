"""Operators that make a tensor from nothing, or of the dtype of another: each rank can make any block of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..capture import Node
from ..layout import P_SUM, S, local_range
from .lengths import small_lengths
from .local import with_local_size
from .operator import Form, LocalCall, Metas, Operator, enter
from .rule import Rule

aten = torch.ops.aten


def _any_block(node: Node, inputs: Metas) -> list[Rule]:
    meta = node.outputs[0]
    assert meta is not None
    return [Rule((), (S(d),)) for d in range(len(meta.shape))]


def _block_or_addend_of_zeros(node: Node, inputs: Metas) -> list[Rule]:
    """Zeros are what ranks add up to that each have zeros: a sum can be written into them in parts."""
    is_zero = len(node.args) < 2 or node.args[1] == 0
    return [*_any_block(node, inputs), *[Rule((), (P_SUM,))] * is_zero]


def _block_of_whole(call: LocalCall) -> Any:
    """Makes the whole tensor, which is small or cheap, and copies the rank's block: a view would hold the whole."""
    meta, layout = call.node.outputs[0], call.outputs[0]
    assert meta is not None and layout is not None
    whole = block = call.run(call.node.op, *call.args, **call.kwargs)
    for dim, size in enumerate(meta.shape):
        start, stop = local_range(size, layout, dim, call.mesh, call.coordinate)
        if stop - start < size:
            block = call.run(aten.slice.Tensor, block, dim, start, stop)
    return block if block is whole else call.run(aten.clone.default, block)


def _small_arange(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    meta = node.outputs[0]
    assert meta is not None
    if len(node.args) == 1:
        return (length[meta.shape[0]],)
    step = node.args[2] if len(node.args) > 2 else 1
    return (node.args[0], node.args[0] + step * length[meta.shape[0]], *node.args[2:])


def _small_constant(node: Node, inputs: Metas, parts: int, ranks: int) -> Form:
    """Numbers in order, in a shape that is cut like the real one."""
    shape = node.args[1]
    length = small_lengths(set(shape), set(), parts, ranks)
    small_shape = tuple(length[size] for size in shape)
    return replace(node, args=(tuple(range(math.prod(small_shape))), small_shape)), ()


def _without_strides(call: LocalCall) -> Any:
    """Makes a contiguous tensor of the local size: strides are no part of a captured graph."""
    return with_local_size(1, aten.new_empty.default)(replace(call, args=call.args[:2]))


enter("zeros full", Operator(rules=_block_or_addend_of_zeros, local=with_local_size(0), kernel="copy"))
enter("ones", Operator(rules=_any_block, local=with_local_size(0), kernel="copy"))
enter("empty", Operator(rules=_any_block, local=with_local_size(0), traits=("uninitialised",)))
enter("arange", Operator(rules=_any_block, local=_block_of_whole, small=_small_arange))
enter("linspace logspace eye tril_indices triu_indices", Operator(rules=_any_block, local=_block_of_whole))
enter("hann_window hamming_window bartlett_window", Operator(rules=_any_block, local=_block_of_whole))
enter(
    "constant",
    Operator(rules=_any_block, local=_block_of_whole, small_form=_small_constant, kernel="copy"),
    namespace="autoshard",
)
enter("new_zeros new_ones new_full", Operator(local=with_local_size(1), kernel="copy"))
enter("new_empty", Operator(local=with_local_size(1), traits=("uninitialised",)))
enter("new_empty_strided", Operator(local=_without_strides, traits=("uninitialised",)))
enter("empty_like", Operator(kernel="copy", traits=("uninitialised",)))
enter("zeros_like ones_like full_like", Operator(kernel="copy"))
