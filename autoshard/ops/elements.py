"""Operators that work element by element, or move elements: casts, sums, triangles, copies, indexing.

Where an index says what is read or written: :mod:`autoshard.ops.indexing`.
"""

from __future__ import annotations

from typing import Any

import torch

from ..capture import Node, TensorMeta
from ..layout import P_SUM, Placement, R, S, local_range
from .local import on_contiguous, on_rows
from .operator import LocalCall, Metas, Operator, as_it_is, enter
from .parts_of_dims import cat_in_parts, glu_in_parts
from .rule import Rule


def _triangle_rules(node: Node, inputs: Metas) -> list[Rule]:
    return [Rule((p,), (p,)) for p in (P_SUM, *(S(d) for d in range(len(inputs[0].shape))))]


def _triangle_of_block(call: LocalCall) -> Any:
    """The diagonal of the whole matrix is one of the rank's block, whose first element is (row, column)."""
    node, shape = call.node, call.metas[0].shape
    dims = len(shape) - 2, len(shape) - 1
    row, column = (local_range(shape[dim], call.inputs[0], dim, call.mesh, call.coordinate)[0] for dim in dims)
    diagonal: int = node.args[1] if len(node.args) > 1 else dict(node.kwargs).get("diagonal", 0)
    return call.run(node.op, call.args[0], diagonal + row - column)


def _element_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Element by element, cut along any dim of the result. Dims count from the last; what is of length 1 along one, or
    has none, is repeated there and whole: the slopes of ``prelu``, what ``copy`` copies.
    """
    meta = node.outputs[0]
    assert meta is not None
    rank = len(meta.shape)

    def cut(other: TensorMeta | None, dim: int) -> Placement:
        d = -1 if other is None else dim - rank + len(other.shape)
        return S(d) if other and d >= 0 and other.shape[d] == meta.shape[dim] else R

    return [
        Rule(tuple(cut(m, d) for m in inputs), tuple(None if m is None else cut(m, d) for m in node.outputs))
        for d, size in enumerate(meta.shape)
        if size > 1
    ]


def _taking_values(node: Node, inputs: Metas) -> list[Rule]:
    """A tensor that takes the values of another: only its size matters, so that these may be addends as they come."""
    return [*_element_rules(node, inputs), Rule((R, P_SUM), (P_SUM,)), Rule((P_SUM, P_SUM), (P_SUM,))]


def _addends_of_complex(node: Node, inputs: Metas) -> list[Rule]:
    """Gradients of weights in the frequency domain are sums over the batch, which DTensor would have reduced here."""
    return [Rule((P_SUM,), (P_SUM,)) for meta in inputs if meta.dtype.is_complex]  # none of a number, as of 1j * x


def _padded(node: Node, inputs: Metas) -> list[Rule]:
    """The dims in front of those that are padded; and addends, where that is with zeros."""
    return [Rule((p,), (p,)) for p in (P_SUM, *(S(d) for d in range(len(inputs[0].shape) - len(node.args[1]) // 2)))]


def _held_to_numbers(node: Node, inputs: Metas) -> list[Rule]:
    """A tensor in any way, beside numbers that every rank has."""
    return [Rule((p, R), (p,)) for p in (P_SUM, *(S(d) for d in range(len(inputs[0].shape))))]


def _held_here(call: LocalCall) -> Any:
    return call.run(call.node.op, *call.args, call.node.source)


def _no_others(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return values[0], torch.zeros_like(values[1])


def _between_0_and_1(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Numbers of which functions that have no others make some."""
    return tuple(value.sigmoid() if value.is_floating_point() else value for value in values)


enter(
    "_prelu_kernel _prelu_kernel_backward log_sigmoid_backward",
    Operator(rules=_element_rules),
)
enter("softplus_backward floor_divide", Operator(rules=_element_rules, local=on_rows()))
enter("acos asin atanh erfinv logit special_ndtri", Operator(meant=_between_0_and_1))
enter("log_sigmoid_forward", Operator(rules=_element_rules, local=on_rows(or_alike=False)))
enter(
    "elu_backward hardtanh_backward hardswish_backward hardsigmoid_backward logit_backward "
    "binary_cross_entropy_backward xlogy.Tensor special_xlog1py copysign.Tensor ldexp heaviside "
    "logical_and logical_or logical_xor logaddexp logaddexp2",  # the last two in torch 2.11 alone
    Operator(local=on_rows()),
)
enter(
    "native_dropout_backward smooth_l1_loss_backward huber_loss_backward pow.Scalar float_power.Scalar isin "
    "poisson _standard_gamma channel_shuffle",
    Operator(local=on_rows(or_alike=False)),
)
enter("glu", Operator(in_parts=glu_in_parts))
enter("glu_backward", Operator(in_parts=glu_in_parts, local=on_rows()))
enter("fill.Scalar", Operator(rules=_element_rules, kernel="copy"))
enter("fill.Tensor", Operator(rules=_taking_values, kernel="copy"))
enter("copy", Operator(rules=_taking_values, kernel="copy", traits=("linear",)))
enter("add.Tensor", Operator(traits=("sum",)))
enter("_to_copy", Operator(kernel="copy", traits=("cast",)))
enter("where.self masked_fill.Scalar masked_fill.Tensor", Operator(traits=("masked",)))
enter("tril triu", Operator(more_rules=_triangle_rules, local=_triangle_of_block))
enter("cat", Operator(in_parts=cat_in_parts, kernel="copy", traits=("linear",)))
enter("stack contiguous flip", Operator(kernel="copy", traits=("linear",)))
enter("constant_pad_nd", Operator(more_rules=_padded, kernel="copy", traits=("linear",)))
enter("roll", Operator(local=on_contiguous(0), kernel="copy", traits=("linear",)))
enter("clone", Operator(more_rules=_addends_of_complex, kernel="copy", traits=("copied", "linear")))
enter("_conj", Operator(more_rules=_addends_of_complex))
enter(
    "as_in_example as_long",
    Operator(rules=_held_to_numbers, local=_held_here, small=as_it_is, meant=_no_others, kernel="copy"),
    namespace="autoshard",
)
enter("mul div neg", Operator(traits=("scaling",)))
enter("topk sort", Operator(kernel="indexing", traits=("choice",)))
enter(
    "scatter scatter_reduce index_copy take masked_select",
    Operator(kernel="indexing"),
)
