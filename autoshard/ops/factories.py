"""Operators that make a tensor from nothing, or of the dtype of another: each rank can make any block of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..capture import Node
from ..layout import S, local_range
from .local import with_local_size
from .operator import LocalCall, Metas, Operator, enter
from .rule import Rule

aten = torch.ops.aten


def _any_block(node: Node, inputs: Metas) -> list[Rule]:
    meta = node.outputs[0]
    assert meta is not None
    return [Rule((), (S(d),)) for d in range(len(meta.shape))]


def _range_of_block(call: LocalCall) -> Any:
    meta, layout = call.node.outputs[0], call.outputs[0]
    assert meta is not None and layout is not None
    start, stop = local_range(meta.shape[0], layout, 0, call.mesh, call.coordinate)
    whole = call.run(call.node.op, *call.args, **call.kwargs)
    return whole if stop - start == meta.shape[0] else call.run(aten.slice.Tensor, whole, 0, start, stop)


def _small_arange(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    meta = node.outputs[0]
    assert meta is not None
    if len(node.args) == 1:
        return (length[meta.shape[0]],)
    step = node.args[2] if len(node.args) > 2 else 1
    return (node.args[0], node.args[0] + step * length[meta.shape[0]], *node.args[2:])


def _without_strides(call: LocalCall) -> Any:
    """Makes a contiguous tensor of the local size: strides are no part of a captured graph."""
    return with_local_size(1, aten.new_empty.default)(replace(call, args=call.args[:2]))


enter("zeros ones full", Operator(rules=_any_block, local=with_local_size(0), kernel="copy"))
enter("empty", Operator(rules=_any_block, local=with_local_size(0), traits=("uninitialised",)))
enter("arange", Operator(rules=_any_block, local=_range_of_block, small=_small_arange))
enter("new_zeros new_ones new_full", Operator(local=with_local_size(1), kernel="copy"))
enter("new_empty", Operator(local=with_local_size(1), traits=("uninitialised",)))
enter("new_empty_strided", Operator(local=_without_strides, traits=("uninitialised",)))
enter("empty_like", Operator(kernel="copy", traits=("uninitialised",)))
enter("zeros_like ones_like full_like fill", Operator(kernel="copy"))
