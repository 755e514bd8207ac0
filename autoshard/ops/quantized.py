"""Numbers as they are when few bits are left of them (quantization-aware training): element by element, with a scale
and a zero point for all, or for each index of one dim.
"""

from __future__ import annotations

import torch

from ..capture import Node
from ..layout import R, S
from .operator import Metas, Operator, as_it_is, enter
from .rule import Rule


def _any_dim(node: Node, inputs: Metas) -> list[Rule]:
    """Any dim; what is quantized along one has its scales cut with it."""
    axis = node.args[3] if node.op is torch.ops.aten.fake_quantize_per_channel_affine_cachemask.default else None
    rank, others = len(inputs[0].shape), len(inputs) - 1

    def cut(d: int) -> Rule:
        scales = S(0) if axis is not None and d == axis % rank else R
        return Rule((S(d), *(scales,) * others), (S(d),) * len(node.outputs))

    return [cut(d) for d in range(rank)]


def _meant(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Scales above zero and zero points that are zero, of the types that kernels take; and that it is switched on."""
    x, *others = values
    scale, zero_point = ([each.abs().float() + 0.1 for each in others[:1]], [each.int() * 0 for each in others[1:2]])
    return x, *scale, *zero_point, *(torch.ones_like(each) for each in others[2:])


enter(
    "fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine_cachemask "
    "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    Operator(rules=_any_dim, small=as_it_is, meant=_meant),
)
