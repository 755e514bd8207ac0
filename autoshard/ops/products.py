"""Matrix products, and attention, which is two of them. Attention is cut over batch and heads."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..capture import Node, Ref
from ..layout import P_SUM, Placement, R, S
from .operator import LocalCall, Metas, Operator, Shape, enter
from .rule import Rule

aten = torch.ops.aten


def _flops(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """2 M N K of (M, K) and (K, N), multiply and add counted as two."""
    return 2.0 * math.prod(outputs[0]) * inputs[-2][-1]


def _bias_added_once(node: Node, inputs: Metas) -> list[Rule]:
    """Cut along the summed dim. DTensor wants the bias as addends, which nothing becomes; here every rank has the bias
    and the first one adds it.
    """
    return [] if node.kwargs else [Rule((R, S(1), S(0)), (P_SUM,))]


def _product_and_bias(call: LocalCall) -> Any:
    """Where the result is addends and the bias whole, the first rank of an axis adds the bias."""
    bias, result = call.inputs[0], call.outputs[0]
    assert result is not None
    is_added_elsewhere = any(
        at > 0 and added.kind == "R" and partial.kind == "P"
        for at, added, partial in zip(call.coordinate, bias, result)
    )
    if is_added_elsewhere:
        return call.run(aten.mm.default, *call.args[1:])
    return call.run(call.node.op, *call.args, **call.kwargs)


def _vector_rules(node: Node, inputs: Metas) -> list[Rule]:
    """A matrix times a vector, cut by rows or along the sum; what is added to it is cut by rows alone."""
    if len(inputs) == 3:
        added = S(0) if inputs[0].shape == inputs[1].shape[:1] else R
        return [Rule((added, S(0), R), (S(0),))]
    return [
        Rule((S(0), R), (S(0),)),
        Rule((S(1), S(0)), (P_SUM,)),
        Rule((P_SUM, R), (P_SUM,)),
        Rule((R, P_SUM), (P_SUM,)),
    ]


def _attention_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Dims 0 (batch) and 1 (heads) of every tensor; a bias that broadcasts along the dim is whole on each rank."""
    bias = inputs[-1].shape if isinstance(node.args[-3], Ref) else None
    tensors = inputs if bias is None else inputs[:-1]
    rules = []
    for dim in (0, 1):
        if len({meta.shape[dim] for meta in tensors}) == 1:
            placements = [S(dim)] * len(tensors) + ([] if bias is None else [_bias_placement(bias, dim)])
            rules.append(Rule(tuple(placements), (S(dim),) * len(node.outputs)))
    return rules


def _bias_placement(shape: tuple[int, ...], dim: int) -> Placement:
    position = dim - (4 - len(shape))
    return R if position < 0 or shape[position] == 1 else S(position)


def _attention_flops(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """Two products of 2 B H T S D each forward, half of it where causal.

    Source: Dao 2023, FlashAttention-2, section 4.1.
    """
    return _products(2, node, inputs[0], inputs[1])


def _attention_backward_flops(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """Five products of that size. Source: as above."""
    return _products(5, node, inputs[1], inputs[2])


def _products(count: int, node: Node, q: Shape, k: Shape) -> float:
    is_causal = node.args[-2]
    return count * 2.0 * math.prod(q) * k[2] * (0.5 if is_causal else 1.0)


enter("mm", Operator(kernel="matmul", flops=_flops, traits=("contraction",)))
enter("addmm.dtype", Operator(kernel="matmul", flops=_flops, traits=("contraction",)))
enter(
    "addmm",
    Operator(
        more_rules=_bias_added_once, local=_product_and_bias, kernel="matmul", flops=_flops, traits=("contraction",)
    ),
)
enter("mv addmv", Operator(rules=_vector_rules, kernel="matmul", flops=_flops))
enter("bmm baddbmm", Operator(kernel="matmul", flops=_flops, traits=("contraction", "batched")))
enter(
    "attention",
    Operator(rules=_attention_rules, kernel="attention", flops=_attention_flops, traits=("attention",)),
    namespace="autoshard",
)
enter(
    "attention_backward",
    Operator(rules=_attention_rules, kernel="attention", flops=_attention_backward_flops, traits=("attention",)),
    namespace="autoshard",
)
