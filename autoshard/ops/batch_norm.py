"""Batch norm and its backward in parts (:mod:`autoshard.capture.operators.batch_norm_parts`).

Whole, or cut along the channels, it is torch's own kernel and has no parts. Cut along the batch or along images, a rank
makes sums of what it has of each channel, all-reduces make them those of the channel, and the rank its rows of the
result: SyncBatchNorm. By statistics that are kept, in evaluation, it mixes no rows.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from ..capture import Node, TensorMeta
from ..layout import P_SUM, Layout, Placement, R, S
from .operator import LocalCall, Metas, Operator, enter
from .rule import Rule

aten = torch.ops.aten
ours = torch.ops.autoshard

Tensors = tuple[torch.Tensor, ...]
_CHANNELS = 1


def _rules(numbers: Placement, node: Node, inputs: Metas) -> list[Rule]:
    """All are cut along the channels; or images along another dim, and what is a number for each channel is whole where
    it is taken, and where it is given as said here. Where there should be such numbers there may be none.
    """
    rank = len(inputs[0].shape)

    def of(meta: TensorMeta, cut: Placement, number: Placement) -> Placement:
        return cut if len(meta.shape) == rank else number if meta.shape[0] else R

    def rule(cut: Placement, taken: Placement, given: Placement) -> Rule:
        results = (None if m is None else of(m, cut, given) for m in node.outputs)
        return Rule(tuple(of(m, cut, taken) for m in inputs), tuple(results))

    others = (d for d in range(rank) if d != _CHANNELS)
    return [rule(S(_CHANNELS), S(0), S(0)), *(rule(S(d), R, numbers) for d in others)]


def _as_one(node: Node, layouts: tuple[Layout, ...]) -> bool:
    return all(p.kind != "S" or p.dim == _CHANNELS for p in layouts[0])


def _forward(call: LocalCall) -> Any:
    if not _as_one(call.node, call.inputs):
        return call.run(call.node.op, *call.args)
    x, _, _, *others, momentum, eps, _, _ = call.args
    op = aten._native_batch_norm_legit_functional.default if len(others) > 2 else aten._native_batch_norm_legit.no_stats
    return call.run(op, x, *others, True, momentum, eps)


def _backward(call: LocalCall) -> Any:
    if not _as_one(call.node, call.inputs):
        return call.run(call.node.op, *call.args)
    grad, x, _, _, mean, scale, weight, eps, wanted, _ = call.args
    grad, x = call.lying_alike(grad, x)
    return call.run(
        aten.native_batch_norm_backward.default, grad, x, weight, None, None, mean, scale, True, eps, list(wanted)
    )


def _backward_in_evaluation(call: LocalCall) -> Any:
    grad, x, *others = call.args
    return call.run(call.node.op, *call.lying_alike(grad, x), *others, **call.kwargs)


def _passes(several: float, node: Node, inputs: Metas, layouts: tuple[Layout, ...]) -> float:
    return 1.0 if _as_one(node, layouts) else several


def _small(
    position: int, node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]
) -> tuple[Any, ...]:
    """The count of numbers of a channel follows the small images."""
    count = math.prod(shapes[0]) // shapes[0][_CHANNELS]
    return (*node.args[:position], count, *node.args[position + 1 :])


def _its_sum(node: Node, values: Tensors) -> Tensors:
    return values[0], ours.channel_sum(values[0])


def _its_sums(node: Node, values: Tensors) -> Tensors:
    x, _, _, *others = values
    total = ours.channel_sum(x)
    return x, total, ours.channel_squares(x, total, x.numel() // x.shape[_CHANNELS]), *others


def _its_products(node: Node, values: Tensors) -> Tensors:
    grad, x, _, _, mean, scale, *others = values
    return grad, x, ours.channel_sum(grad), ours.channel_products(grad, x, mean, scale), mean, scale, *others


def _part(**known: Any) -> Operator:
    return Operator(rules=partial(_rules, P_SUM), as_one=_as_one, kernel="reduction", traits=("statistics",), **known)


# by statistics that are kept: of a batch norm that is evaluated, or frozen in training
enter("_native_batch_norm_legit_no_training", Operator(rules=partial(_rules, R), kernel="normalization"))
enter(
    "native_batch_norm_backward",
    Operator(rules=partial(_rules, P_SUM), local=_backward_in_evaluation, kernel="normalization"),
)
enter("channel_sum", _part(), namespace="autoshard")
enter("channel_squares", _part(small=partial(_small, 2), meant=_its_sum), namespace="autoshard")
# what is beside the mean is written, read and written as products, and these are read: six passes over images, not two
enter("channel_products", _part(passes=partial(_passes, 3.0)), namespace="autoshard")
for _name, _count_at in (("batch_norm", 7), ("batch_norm_in_training", 9)):
    enter(
        _name,
        Operator(
            rules=partial(_rules, R),
            local=_forward,
            parts=(1, 2),
            as_one=_as_one,
            small=partial(_small, _count_at),
            meant=_its_sums,
            kernel="normalization",
        ),
        namespace="autoshard",
    )
# three kernels, seven passes over images, not three
enter(
    "batch_norm_backward",
    Operator(
        rules=partial(_rules, R),
        local=_backward,
        parts=(2, 3),
        as_one=_as_one,
        small=partial(_small, 9),
        meant=_its_products,
        kernel="normalization",
        passes=partial(_passes, 7 / 3),
        traits=("statistics",),
    ),
    namespace="autoshard",
)
