"""Normalizations and softmax."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from ..capture import Node
from ..layout import P_SUM, Placement, R, S, local_shape
from .local import on_contiguous, on_rows
from .operator import LocalCall, Metas, Operator, enter
from .rule import Rule

aten = torch.ops.aten

# Group norms carry the length of the batch dim at these positions; the number of channels, the size of an image and the
# number of groups follow, and then, in the forward, weights.
_FORWARD, _BACKWARD = 3, 5


def _group_norm_rules(position: int, node: Node, inputs: Metas) -> list[Rule]:
    """Images cut over the batch, weights whole, whose gradients are then partial sums; all cut along the groups."""

    def rule(weights: Placement, cut: Placement, given: Placement) -> Rule:
        taken = tuple(weights if len(meta.shape) == 1 else cut for meta in inputs)
        results = (cut if meta and len(meta.shape) > 1 else given for meta in node.outputs)
        return Rule(taken, tuple(p if meta else None for meta, p in zip(node.outputs, results)))

    batch = rule(R, S(0), P_SUM)
    return [batch, rule(S(0), S(1), S(0))] if node.args[position + 3] > 1 else [batch]


def _whole_groups(position: int, node: Node, inputs: Metas, *given: Any) -> bool:
    """Whether every rank has whole groups, where channels are cut."""
    layouts, _, mesh = given
    return bool(node.args[position + 3] % math.prod(mesh.shape[axis] for axis in layouts[0].axes_of(1)) == 0)


def _group_norm(call: LocalCall) -> Any:
    x, *others = _of_local_images(_FORWARD, call)
    return call.run(call.node.op, *_as_wanted(call, x), *others, **call.kwargs)


def _group_norm_backward(call: LocalCall) -> Any:
    grad, x, mean, scale, *others = _of_local_images(_BACKWARD, call)
    statistics = (call.run(aten.contiguous.default, each) for each in (mean, scale))
    return call.run(call.node.op, *_as_wanted(call, grad, x), *statistics, *others, **call.kwargs)


def _as_wanted(call: LocalCall, *images: Any) -> tuple[Any, ...]:
    """Images as the kernels of group norms want them, which ``torch.group_norm`` sees to: with their channels first in
    memory, or last, all alike. One image alone has them first: which it is, torch tells by the step to the next one.
    """
    looks = [call.caller.value(x) for x in images]
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(looks[0].dim())
    if last is not None and looks[0].shape[0] > 1:
        strides = torch.empty(looks[0].shape, device="meta", memory_format=last).stride()
        if all(x.stride() == strides for x in looks):
            return images
    return tuple(call.run(aten.contiguous.default, x) for x in images)


def _of_local_images(position: int, call: LocalCall) -> tuple[Any, ...]:
    whole = call.metas[0].shape
    rows, channels, *_ = local_shape(whole, call.inputs[0], call.mesh, call.coordinate)
    before, (size, groups, *rest) = call.args[:position], call.args[position + 2 :]
    return (*before, rows, channels, size, groups * channels // whole[1], *rest)


def _small_group_norm(
    position: int, node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]
) -> tuple[Any, ...]:
    """The arguments N and HxW follow the small shape of the images; C and the number of groups stay."""
    images = shapes[0] if position == _FORWARD else shapes[1]
    return (*node.args[:position], images[0], images[1], math.prod(images[2:]), *node.args[position + 3 :])


def _keeps_channels(node: Node, position: int, dim: int, rank: int) -> bool:
    return dim == 1 or rank == 1


def _weight_norm_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Directions and lengths are cut along the dim that has the lengths: each is the norm of all else."""
    dim = node.args[len(inputs)] if len(node.args) > len(inputs) else 0
    cut = S(dim % len(inputs[0].shape))
    return [Rule((cut,) * len(inputs), (cut,) * len(node.outputs))]


def _weight_norm_backward_rules(node: Node, inputs: Metas) -> list[Rule]:
    """The same, and addends of the gradient, in which it is linear."""
    addends = Rule((P_SUM, R, R, R), (P_SUM, P_SUM))
    return [*_weight_norm_rules(node, inputs), addends]


def _renorm_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Cut along the dim of which each index is held to a length: that is the norm of all else."""
    cut = S(node.args[2] % len(inputs[0].shape))
    return [Rule((cut,), (cut,))]


enter("renorm", Operator(rules=_renorm_rules, kernel="normalization"))
enter(
    "_weight_norm_interface",
    Operator(rules=_weight_norm_rules, local=on_contiguous(0, 1), kernel="normalization"),
)
enter(
    "_weight_norm_interface_backward",
    Operator(rules=_weight_norm_backward_rules, local=on_contiguous(0, 1, 2, 3), kernel="normalization"),
)
enter(
    "native_group_norm",
    Operator(
        more_rules=partial(_group_norm_rules, _FORWARD),
        suits=partial(_whole_groups, _FORWARD),
        local=_group_norm,
        small=partial(_small_group_norm, _FORWARD),
        keeps=_keeps_channels,
        kernel="normalization",
    ),
)
enter(
    "native_group_norm_backward",
    Operator(
        more_rules=partial(_group_norm_rules, _BACKWARD),
        suits=partial(_whole_groups, _BACKWARD),
        local=_group_norm_backward,
        small=partial(_small_group_norm, _BACKWARD),
        keeps=_keeps_channels,
        kernel="normalization",
    ),
)
enter("native_layer_norm_backward", Operator(local=on_contiguous(0, 1, 3, 4), kernel="normalization"))
# A norm that capture decomposes (RMSNorm) is priced as the parts it runs as.
enter(
    "native_layer_norm native_batch_norm batch_norm_backward "
    "_native_batch_norm_legit _native_batch_norm_legit_functional "
    "_batch_norm_with_update_functional _fused_rms_norm _fused_rms_norm_backward",
    Operator(kernel="normalization"),
)
enter(
    "_softmax _softmax_backward_data _log_softmax _safe_softmax logsumexp",
    Operator(kernel="softmax"),
)
enter("_log_softmax_backward_data", Operator(local=on_rows(or_alike=False), kernel="softmax"))
