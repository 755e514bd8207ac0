"""Our own rules, for operators where torch has none or where an exact condition is known. They are checked too.

Attention: sharded over batch and heads. Factories: any block. Views: a cut dim of the input stays one cut dim of the
result exactly when both cuts take the same elements (:func:`aligned`), uneven shards included.
"""

from __future__ import annotations

import math

import torch

from ..capture import CONSTRAIN, Node, Ref, TensorMeta
from ..capture.attention import attention, attention_backward
from ..layout import P_SUM, Layout, P, Placement, R, S, is_even, local_range
from ..localize import FACTORIES, TRIANGLES, VIEWS
from ..mesh import Mesh
from .rule import Rule

aten = torch.ops.aten

# operators that reduce to a truth, and how the truths of the ranks are one
_TRUTHS = {
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), P("max")),
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), P("min")),
}
_ATTENTION = {attention._opoverload, attention_backward._opoverload}


def own_rules(node: Node, inputs: tuple[TensorMeta, ...]) -> list[Rule] | None:
    """Our rules for an operator, or None where it is DTensor's business."""
    if node.op in _ATTENTION:
        return _attention_rules(node, inputs)
    if node.op is CONSTRAIN:  # the same tensor
        dims = range(len(inputs[0].shape))
        return [Rule((P_SUM,), (P_SUM,)), *(Rule((S(d),), (S(d),)) for d in dims)]
    if node.op in FACTORIES:
        meta = node.outputs[0]
        assert meta is not None
        return [Rule((), (S(d),)) for d in range(len(meta.shape))]
    if node.op in VIEWS:
        meta = node.outputs[0]
        assert meta is not None
        return _view_rules(inputs[0].shape, meta.shape)
    return None


def added_rules(node: Node, inputs: tuple[TensorMeta, ...]) -> list[Rule]:
    """Our rules beside DTensor's.

    A product with a bias, cut along the summed dim: DTensor wants the bias as addends, which nothing becomes. Here
    every rank has the bias and the first one adds it. *Any* and *all* over a cut dim: the largest and the smallest of
    the ranks' truths, where DTensor adds up booleans. Triangles, whose local form knows where its block starts.
    """
    if node.op is aten.addmm.default and not node.kwargs:
        return [Rule((R, S(1), S(0)), (P_SUM,))]
    if node.op in _TRUTHS:
        return [Rule((S(d),), (_TRUTHS[node.op],)) for d in range(len(inputs[0].shape))]
    if node.op in TRIANGLES:
        return [Rule((p,), (p,)) for p in (P_SUM, *(S(d) for d in range(len(inputs[0].shape))))]
    if node.op is aten.native_group_norm_backward.default:
        batch = tuple(R if len(meta.shape) == 1 else S(0) for meta in inputs)
        results = (p if meta else None for meta, p in zip(node.outputs, (S(0), P_SUM, P_SUM)))
        return [Rule(batch, tuple(results))]
    return []


def _attention_rules(node: Node, inputs: tuple[TensorMeta, ...]) -> list[Rule]:
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


def _view_rules(before: tuple[int, ...], after: tuple[int, ...]) -> list[Rule]:
    rules = [Rule((P_SUM,), (P_SUM,))]
    for i, size in enumerate(before):
        outer = math.prod(before[:i])
        for j, other in enumerate(after):
            if size > 1 and other > 1 and math.prod(after[:j]) == outer:
                rules.append(Rule((S(i),), (S(j),)))
    return rules


def aligned(before: tuple[int, ...], a: Layout, after: tuple[int, ...], b: Layout, mesh: Mesh) -> bool:
    """Whether reshaping every rank's shard in layout ``a`` gives its shard in layout ``b``.

    A block ``[lo, hi)`` of dim ``i`` takes, in row-major order, in each of ``prod(shape[:i])`` periods the elements
    ``[lo, hi) * prod(shape[i+1:])``. The reshape is local when both sides take the same elements on every rank; of even
    cuts, whose blocks start at multiples of their width, the first two ranks along every axis tell it. Not seen: a rank
    that holds one index of a cut dim may hold what is also a cut of the next dim.
    """
    even = is_even(before, a, mesh) and is_even(after, b, mesh)
    coordinates = _first_ranks(mesh) if even else mesh.coordinates()
    return all(_elements(before, a, mesh, c) == _elements(after, b, mesh, c) for c in coordinates)


def _first_ranks(mesh: Mesh) -> list[tuple[int, ...]]:
    return [tuple(min(int(i == axis), size - 1) for i, size in enumerate(mesh.shape)) for axis in range(-1, mesh.ndim)]


def _elements(shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> set[tuple[int, ...]]:
    taken: set[tuple[int, ...]] = set()
    for dim in range(len(shape)):
        if layout.axes_of(dim):
            start, stop = local_range(shape[dim], layout, dim, mesh, coordinate)
            inner = math.prod(shape[dim + 1 :])
            taken.add((math.prod(shape[:dim]), start * inner, stop * inner))
    return taken
