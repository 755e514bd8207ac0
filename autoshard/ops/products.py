"""Matrix products, and attention, which is two of them.

Attention is cut over batch, heads and queries. A block of queries wants all keys and values, and gives addends of their
gradients (context parallelism). Where it is causal, the last queries see most keys: cut in parts, a rank has some of
each part, so that ranks do more nearly as much.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from ..capture import Node, Ref
from ..layout import P_SUM, Layout, Placement, R, S, local_ranges
from .operator import LocalCall, Metas, Operator, Shape, enter, has
from .rule import Rule

aten = torch.ops.aten


def _flops(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """2 M N K of (M, K) and (K, N), or (N, K), multiply and add counted as two."""
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


def _inner_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Of two vectors, cut along the sum."""
    return [Rule((S(0), S(0)), (P_SUM,)), Rule((P_SUM, R), (P_SUM,)), Rule((R, P_SUM), (P_SUM,))]


def _inner_flops(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    return 2.0 * math.prod(inputs[0])


def _product_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Any dim in front, rows, columns, and the dim that is summed."""
    rank = len(inputs[0].shape)
    cut = [Rule((S(d), S(d)), (S(d),)) for d in range(rank - 2)]
    rows, columns = S(rank - 2), S(rank - 1)
    return [*cut, Rule((rows, R), (rows,)), Rule((R, columns), (columns,)), Rule((columns, rows), (P_SUM,))]


def _product_of_shard(call: LocalCall) -> Any:
    return call.run(aten.matmul.default, *call.args)


def _linear_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Of (..., K) and (N, K): any dim in front, the matrix by rows, and the dim that is summed."""
    rank = len(inputs[0].shape)
    cut = [Rule((S(d), R), (S(d),)) for d in range(rank - 1)]
    return [*cut, Rule((R, S(0)), (S(rank - 1),)), Rule((S(rank - 1), S(1)), (P_SUM,))]


def _outer_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Of (..., N) and (..., K): addends of any dim in front, or a block of the result."""
    rank = len(inputs[0].shape)
    addends = [Rule((S(d), S(d)), (P_SUM,)) for d in range(rank - 1)]
    return [*addends, Rule((S(rank - 1), R), (S(0),)), Rule((R, S(rank - 1)), (S(1),))]


def _outer_flops(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """2 R N K of R rows."""
    return 2.0 * math.prod(inputs[0]) * inputs[1][-1]


def _rules_of_each(node: Node, inputs: Metas) -> list[Rule]:
    """Of (G, ..., K) and (G, N, K): G, any dim between, the matrices by rows, and the dim that is summed."""
    rank = len(inputs[0].shape)
    between = [Rule((S(d), R), (S(d),)) for d in range(1, rank - 1)]
    return [
        Rule((S(0), S(0)), (S(0),)),
        *between,
        Rule((R, S(1)), (S(rank - 1),)),
        Rule((S(rank - 1), S(2)), (P_SUM,)),
    ]


def _outer_rules_of_each(node: Node, inputs: Metas) -> list[Rule]:
    """Of (G, ..., N) and (G, ..., K): G, addends of any dim between, or a block of each matrix."""
    rank = len(inputs[0].shape)
    addends = [Rule((S(d), S(d)), (P_SUM,)) for d in range(1, rank - 1)]
    return [
        Rule((S(0), S(0)), (S(0),)),
        *addends,
        Rule((S(rank - 1), R), (S(1),)),
        Rule((R, S(rank - 1)), (S(2),)),
    ]


def _attention_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Dims 0 (batch) and 1 (heads) of every tensor; a bias that broadcasts along the dim is whole on each rank. Where
    keys and values have fewer heads, each rank has those that its queries read.
    """
    bias = _bias_of(node, inputs)
    tensors = inputs if bias is None else inputs[:-1]
    rules = []
    for dim in (0, 1):
        if len({meta.shape[dim] for meta in tensors}) == 1 or (dim == 1 and _grouped(inputs)):
            placements = [S(dim)] * len(tensors) + ([] if bias is None else [_bias_placement(bias, dim)])
            rules.append(Rule(tuple(placements), (S(dim),) * len(node.outputs)))
    return rules if bias is not None and _is_causal(node) else [*rules, _queries_cut(node, bias)]


def _grouped(inputs: Metas) -> tuple[int, int] | None:
    """The heads of keys and values, and of queries, where these are a multiple of those."""
    few, *many = sorted({meta.shape[1] for meta in inputs[:3]})  # queries among them, and keys
    return (few, many[0]) if few > 1 and len(many) == 1 and many[0] % few == 0 else None


def _small_attention(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    """Heads of queries are twice those of keys where they are a multiple of them."""
    if grouped := _grouped(inputs):
        few, many = grouped
        small = {few: length[few], many: 2 * length[few]}
        is_biased = _bias_of(node, inputs) is not None
        for k, (meta, shape) in enumerate(zip(inputs, shapes)):
            heads = len(shape) - 3 if is_biased and k == len(inputs) - 1 else 1
            if heads >= 0 and meta.shape[heads] in small:
                shape[heads] = small[meta.shape[heads]]
    return node.args


def _queries_cut(node: Node, bias: Shape | None) -> Rule:
    """Dim 2 of what has a row for every query, against all keys and values."""
    added = () if bias is None else (_bias_placement(bias, 2),)
    if len(node.outputs) == 2:
        return Rule((S(2), R, R, *added), (S(2), S(2)))
    return Rule((S(2), S(2), R, R, S(2), S(2), *added), (S(2), P_SUM, P_SUM))


def _bias_of(node: Node, inputs: Metas) -> Shape | None:
    return inputs[-1].shape if isinstance(node.args[-3], Ref) else None


def _is_causal(node: Node) -> bool:
    return bool(node.args[-2])


def is_causal_attention(node: Node) -> bool:
    """Whether a node is attention, or its backward, of which each query sees the keys up to it, and no bias."""
    return has(node, "attention") and _is_causal(node) and not isinstance(node.args[-3], Ref)


def _queries_cut_in_parts(node: Node, inputs: Metas, position: int, placement: Placement) -> list[Rule]:
    """Of causal attention the parts of the queries, of each of which a rank has a block."""
    q = 0 if len(node.outputs) == 2 else 1
    is_of_queries = placement.dim == 2 and position not in (q + 1, q + 2)
    if not is_causal_attention(node) or not is_of_queries or set(placement.parts) != {1}:
        return []
    whole = _queries_cut(node, None)
    cut = [placement if p == S(2) else p for p in (*whole.inputs, *(p for p in whole.outputs if p))]
    return [Rule(tuple(cut[: len(inputs)]), tuple(cut[len(inputs) :]))]


def _attention_of_shard(call: LocalCall) -> Any:
    """Causal attention of blocks of queries sees the keys up to each of them."""
    is_forward = len(call.node.outputs) == 2
    q = 0 if is_forward else 1
    length = call.metas[q].shape[2]
    ranges = local_ranges(length, call.inputs[q], 2, call.mesh, call.coordinate)
    if not _is_causal(call.node) or sum(stop - start for start, stop in ranges) == length:
        return call.run(call.node.op, *call.args)
    op = torch.ops.autoshard.attention_of_blocks if is_forward else torch.ops.autoshard.attention_of_blocks_backward
    *tensors, _, _, scale = call.args
    return call.run(op.default, *tensors, scale, [start for start, _ in ranges])


def _blocks_of_attention(node: Node, inputs: list[Shape], layouts: tuple[Layout, ...]) -> tuple[float, int]:
    """Of causal queries cut in parts what the slowest rank, the last, does of what it would with one block; and two
    kernels for each further block.
    """
    q = 0 if len(node.outputs) == 2 else 1
    parts, whole = len(layouts[q].parts_of(2)), node.outputs[0]
    assert whole is not None
    if parts < 2 or not is_causal_attention(node):
        return 1.0, 0
    length, width = whole.shape[2], inputs[q][2]
    block, part = width / parts, length / parts
    seen = sum(block * (k * part + part - block / 2) for k in range(parts))
    return seen / (width * (length - width / 2)), 2 * (parts - 1)


def _bias_placement(shape: tuple[int, ...], dim: int) -> Placement:
    position = dim - (4 - len(shape))
    return R if position < 0 or shape[position] == 1 else S(position)


def _attention_flops(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """Two products of 2 B H T S D each forward, half of it where causal.

    Of a block of causal queries it is that of the slowest rank, mostly the last, as its queries see the most keys.

    Source: Dao 2023, FlashAttention-2, section 4.1.
    """
    return _products(2, node, inputs[0], inputs[1])


def _attention_backward_flops(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """Five products of that size. Source: as above."""
    return _products(5, node, inputs[1], inputs[2])


def _products(count: int, node: Node, q: Shape, k: Shape) -> float:
    whole = node.outputs[0]
    assert whole is not None
    seen = _largest_share(whole.shape[2], q[2]) if _is_causal(node) else 1.0
    return count * 2.0 * math.prod(q) * k[2] * seen


def _largest_share(length: int, width: int) -> float:
    """Of ``width`` times all keys, what the queries of a block of that width see of causal attention; the most of any
    block. The last one may be shorter.
    """
    full, rest = divmod(length, width)
    return max(width * (full * width - width / 2), rest * (length - rest / 2)) / (width * length)


enter("mm", Operator(kernel="matmul", flops=_flops, traits=("contraction",)))
enter("addmm.dtype", Operator(kernel="matmul", flops=_flops, traits=("contraction",)))
enter(
    "addmm",
    Operator(
        more_rules=_bias_added_once, local=_product_and_bias, kernel="matmul", flops=_flops, traits=("contraction",)
    ),
)
enter("mv addmv", Operator(rules=_vector_rules, kernel="matmul", flops=_flops))
enter("vdot", Operator(rules=_inner_rules, kernel="matmul", flops=_inner_flops))
enter("bmm baddbmm", Operator(kernel="matmul", flops=_flops, traits=("contraction", "batched")))
enter(
    "matmul",
    Operator(rules=_product_rules, local=_product_of_shard, kernel="matmul", flops=_flops, traits=("contraction",)),
    namespace="autoshard",
)
enter(
    "linear",
    Operator(rules=_linear_rules, kernel="matmul", flops=_flops, traits=("contraction",)),
    namespace="autoshard",
)
enter("outer", Operator(rules=_outer_rules, kernel="matmul", flops=_outer_flops), namespace="autoshard")
enter(
    "linear_of_each",
    Operator(rules=_rules_of_each, kernel="matmul", flops=_flops, traits=("contraction", "batched")),
    namespace="autoshard",
)
enter("outer_of_each", Operator(rules=_outer_rules_of_each, kernel="matmul", flops=_outer_flops), namespace="autoshard")
_ATTENTION = Operator(
    rules=_attention_rules,
    in_parts=_queries_cut_in_parts,
    local=_attention_of_shard,
    small=_small_attention,
    kernel="attention",
    flops=_attention_flops,
    blocks=_blocks_of_attention,
    traits=("attention",),
)
enter("attention", _ATTENTION, namespace="autoshard")
enter("attention_backward", replace(_ATTENTION, flops=_attention_backward_flops), namespace="autoshard")
