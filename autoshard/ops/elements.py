"""Operators that work element by element, or move elements: casts, sums, triangles, copies, indexing."""

from __future__ import annotations

from typing import Any

from ..capture import Node
from ..layout import P_SUM, R, S, local_range
from .operator import LocalCall, Metas, Operator, enter
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


def _prelu_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Element by element; the slopes, and what else is of length 1 along a dim, are whole there."""
    shape = inputs[0].shape
    return [
        Rule(tuple(S(d) if meta.shape[d] > 1 else R for meta in inputs), (S(d),) * len(node.outputs))
        for d, size in enumerate(shape)
        if size > 1
    ]


enter("_prelu_kernel _prelu_kernel_backward", Operator(rules=_prelu_rules))
enter("add.Tensor", Operator(traits=("sum",)))
enter("_to_copy", Operator(kernel="copy", traits=("cast",)))
enter("tril triu", Operator(more_rules=_triangle_rules, local=_triangle_of_block))
enter(
    "cat stack clone copy contiguous repeat flip roll constant_pad_nd select_scatter",
    Operator(kernel="copy", traits=("linear",)),
)
enter("mul div neg", Operator(traits=("scaling",)))
enter("index_select", Operator(kernel="indexing", traits=("rows",)))
enter(
    "scatter scatter_reduce index_add index_copy index index_put _unsafe_index "
    "_unsafe_index_put take topk sort masked_select",
    Operator(kernel="indexing"),
)
