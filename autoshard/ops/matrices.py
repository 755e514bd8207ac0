"""Distances between the rows of two matrices; products of three tensors."""

from __future__ import annotations

import math

from ..capture import Node, TensorMeta
from ..layout import P_SUM, Placement, R, S
from .operator import Metas, Operator, Shape, as_it_is, enter
from .rule import Rule


def _pair_by_pair(node: Node, inputs: Metas) -> list[Rule]:
    """Any dim in front of the matrices that the result has, of those that are as long there: others stand for all."""
    made = node.outputs[0]
    assert made is not None

    def cut(meta: TensorMeta, behind: int) -> Placement:
        d = len(meta.shape) - behind
        return S(d) if d >= 0 and meta.shape[d] == made.shape[-behind] else R

    behind_fronts = range(3, len(made.shape) + 1)
    return [Rule(tuple(cut(meta, k) for meta in inputs), (S(len(made.shape) - k),)) for k in behind_fronts]


def _rows(meta: TensorMeta) -> Placement:
    return S(len(meta.shape) - 2)


def _columns(meta: TensorMeta) -> Placement:
    return S(len(meta.shape) - 1)


def _distance_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Of (..., P, M) and (..., R, M): any dim in front, and the rows of either."""
    (x, y), (made,) = inputs, node.outputs
    assert made is not None
    return [*_pair_by_pair(node, inputs), Rule((_rows(x), R), (_rows(made),)), Rule((R, _rows(y)), (_columns(made),))]


def _distance_backward_rules(node: Node, inputs: Metas) -> list[Rule]:
    """The gradient of the first matrix, which takes that of the distances, both matrices and the distances: addends
    where the rows of the second are cut, columns where both are.
    """
    (grad, x, y, distances), (made,) = inputs, node.outputs
    assert made is not None
    return [
        *_pair_by_pair(node, inputs),
        Rule((_rows(grad), _rows(x), R, _rows(distances)), (_rows(made),)),
        Rule((_columns(grad), R, _rows(y), _columns(distances)), (P_SUM,)),
        Rule((R, _columns(x), _columns(y), R), (_columns(made),)),
    ]


def _dims_of_each(node: Node) -> list[list[int]]:
    """Of a product of three tensors: the dims of each, and of the result, among all that there are."""
    expanded, summed = node.args[3:6], node.args[6]
    made = node.outputs[0]
    assert made is not None
    every = range(len(made.shape) + len(summed))
    return [[d for d in every if d not in without] for without in (*expanded, summed)]


def _product_of_three(node: Node, inputs: Metas) -> list[Rule]:
    """Any dim, of those that have it; addends where it is summed. Addends of one of them make addends."""
    *taken, made = _dims_of_each(node)
    every = sorted(set().union(made, *taken))

    def cut(d: int) -> Rule:
        return Rule(
            tuple(S(dims.index(d)) if d in dims else R for dims in taken),
            (S(made.index(d)) if d in made else P_SUM,),
        )

    addends = [Rule(tuple(P_SUM if k == one else R for k in range(3)), (P_SUM,)) for one in range(3)]
    return [*map(cut, every), *addends]


def _flops_of_distances(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """A difference, a power and a sum for each column of each pair of rows."""
    one, other = inputs if len(inputs) == 2 else inputs[1:3]
    return 3.0 * math.prod(one) * other[-2]


def _flops_of_three(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """Two products and a sum for each element of all dims."""
    *taken, _ = _dims_of_each(node)
    sizes = {d: size for dims, shape in zip(taken, inputs) for d, size in zip(dims, shape)}
    return 3.0 * math.prod(sizes.values())


enter("_cdist_forward _euclidean_dist", Operator(rules=_distance_rules, flops=_flops_of_distances))
enter("_cdist_backward", Operator(rules=_distance_backward_rules, flops=_flops_of_distances))
enter("_trilinear", Operator(rules=_product_of_three, small=as_it_is, flops=_flops_of_three))
