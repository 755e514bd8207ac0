"""Reductions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from ..capture import Node, TensorMeta
from ..layout import P_SUM, Layout, P, Placement, S
from .local import on_rows
from .operator import LocalCall, Metas, Operator, enter
from .reduced_dims import kept_dims
from .rule import Rule

aten = torch.ops.aten


def _truths(combined: Placement, node: Node, inputs: Metas) -> list[Rule]:
    """*Any* and *all* over a cut dim: the largest and the smallest of the ranks' truths, where DTensor adds up
    booleans.
    """
    return [Rule((S(d),), (combined,)) for d in range(len(inputs[0].shape))]


def _kept(at: int, node: Node, inputs: Metas) -> list[Rule]:
    """Cut along a dim that stays, of those that stand ``at`` a position; norms and spreads of parts do not add up."""
    meta, rank, args = node.outputs[0], len(inputs[0].shape), node.args
    assert meta is not None
    reduced = {d % rank for d in args[at]} if rank and len(args) > at and args[at] else set(range(rank))
    kept = kept_dims(rank, reduced, keepdim=len(meta.shape) == rank)
    return [Rule((S(d),), (S(at),) * len(node.outputs)) for d, at in kept]


def _mean_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Addends where an averaged dim is cut, evenly or not; DTensor has averages of shards, which must be even."""
    return [Rule((S(d),), (P_SUM,)) for d in _averaged(node, inputs[0])]


def _mean(call: LocalCall) -> Any:
    """A mean over a cut dim adds up the shard and divides by the whole length, so that the ranks' results add up."""
    length = _mean_length(call.node, call.metas[0], call.inputs[0])
    if length is None:
        return call.run(call.node.op, *call.args, **call.kwargs)
    total = aten.sum.default if call.node.op is aten.mean.default else aten.sum.dim_IntList
    return call.run(aten.div.Scalar, call.run(total, *call.args, **call.kwargs), length)


def _mean_length(node: Node, meta: TensorMeta, layout: Layout) -> int | None:
    """The number of elements a mean divides by, or None where every averaged dim is whole on each rank."""
    averaged = _averaged(node, meta)
    if not any(layout.axes_of(d) for d in averaged):
        return None
    return math.prod(meta.shape[d] for d in averaged)


def _averaged(node: Node, meta: TensorMeta) -> list[int]:
    """The dims that a mean goes over."""
    rank = len(meta.shape)
    dims = node.args[1] if node.op is aten.mean.dim and len(node.args) > 1 and node.args[1] else range(rank)
    return sorted({d % rank for d in dims}) if rank else []


def _sum_over_all(node: Node, inputs: Metas) -> list[Rule]:
    """A sum over no dims is one over all; DTensor takes it for no sum."""
    if node.op is not aten.sum.dim_IntList or node.args[1]:
        return []
    return [Rule((S(d),), (P_SUM,)) for d in range(len(inputs[0].shape))]


def _running_sum_of_addends(node: Node, inputs: Metas) -> list[Rule]:
    return [Rule((P_SUM,), (P_SUM,))]


enter("cumsum", Operator(more_rules=_running_sum_of_addends, kernel="reduction"))
enter("any", Operator(more_rules=partial(_truths, P("max")), kernel="reduction"))
enter("all", Operator(more_rules=partial(_truths, P("min")), kernel="reduction"))
enter("mean", Operator(more_rules=_mean_rules, local=_mean, kernel="reduction", traits=("mean",)))
enter("norm", Operator(more_rules=partial(_kept, 2), kernel="reduction"))
enter("var_mean std_mean", Operator(more_rules=partial(_kept, 1), kernel="reduction"))
enter("sum", Operator(more_rules=_sum_over_all, kernel="reduction", traits=("linear",)))
enter(
    "prod amax amin aminmax max min argmax argmin var std linalg_vector_norm cumprod "
    "nll_loss_forward nll_loss_backward mse_loss",
    Operator(kernel="reduction"),
)
enter("mse_loss_backward", Operator(local=on_rows(or_alike=False), kernel="reduction"))
