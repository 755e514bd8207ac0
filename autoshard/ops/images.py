"""Convolutions, and what else works on images: pools, paddings, resampling.

An image must fit its kernel, so it stays as large as it is in a check.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ..capture import Node
from ..layout import P_SUM, Placement, R, S, local_shape
from .operator import Flops, Local, LocalCall, Metas, Operator, Rules, Shape, Trait, as_it_is, enter, enter_pattern
from .rule import Rule

aten = torch.ops.aten


class _Convolution(NamedTuple):
    """The positions of strides and groups among the arguments, and how many tensors, the first ones, are images."""

    strides: int
    groups: int
    images: int

    def dims(self, node: Node) -> int:
        """How many of the last dims are the image: one for each stride."""
        return len(node.args[self.strides])

    def is_grouped(self, node: Node) -> bool:
        """Whether channels must fit their groups."""
        return bool(node.args[self.groups] > 1)

    def groups_of_shard(self, call: LocalCall) -> int:
        """Where channels are cut along groups, those of the rank."""
        whole, count = call.metas[0].shape[1], int(call.node.args[self.groups])
        held = local_shape(call.metas[0].shape, call.inputs[0], call.mesh, call.coordinate)[1]
        return count * held // whole if self.is_grouped(call.node) else count


_TRANSPOSED = 6
_FORWARD, _BACKWARD = _Convolution(3, 8, 1), _Convolution(4, 9, 2)


def _keeps_image(images: int, node: Node, position: int, dim: int, rank: int) -> bool:
    return rank > images > 0 and dim >= rank - images


def _keeps_convolution(known: _Convolution, node: Node, position: int, dim: int, rank: int) -> bool:
    """Images stay; and where channels are in groups, so do channels and filters."""
    if _keeps_image(known.dims(node), node, position, dim, rank):
        return True
    return known.is_grouped(node) and (dim == 1 or position >= known.images)


def _small_convolution(
    known: _Convolution, node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]
) -> tuple[Any, ...]:
    return _small_image(known.dims(node), known.is_grouped(node), node, inputs, shapes, length)


def _small_image(
    dims: int, grouped: bool, node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]
) -> tuple[Any, ...]:
    """Shapes of whole tensors among the arguments follow batch and channels."""
    assert node.op is not None
    args = list(node.args)
    for i, (arg, argument) in enumerate(zip(args, node.op._schema.arguments)):
        if argument.name == "input_size":
            args[i] = (*(length[size] for size in arg[:-dims]), *arg[-dims:])
        if argument.name == "bias_sizes" and arg and not grouped:
            args[i] = tuple(length.get(size, size) for size in arg)  # (0,) where there is no bias
    return tuple(args)


def _flops(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """Two (multiply, add) for each number of the result and each weight of one filter."""
    transposed = bool(node.args[6])
    return 2.0 * math.prod(inputs[0] if transposed else outputs[0]) * math.prod(inputs[1][1:])


def _backward_flops(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """Twice those of the forward: one convolution for each of the two gradients."""
    return 4.0 * math.prod(inputs[0]) * math.prod(inputs[2][1:])


def _channels_cut(node: Node, inputs: Metas) -> list[Rule]:
    """The batch. Filters cut, as the columns of a matrix: channels of the result; and channels of the image, which are
    summed, as its rows. Where channels are in groups, along these. Nothing but the batch of other transposed
    convolutions.
    """
    biases = len(inputs) - 2
    batch = Rule((S(0), R, *[R] * biases), (S(0),))
    if _FORWARD.is_grouped(node):
        return [batch, Rule((S(1), S(0), *[S(0)] * biases), (S(1),))]
    if node.args[_TRANSPOSED]:
        return [batch]
    filters = Rule((R, S(0), *[S(0)] * biases), (S(1),))
    return [batch, filters, Rule((S(1), S(1), *[R] * biases), (P_SUM,))]


def _channels_cut_backward(node: Node, inputs: Metas) -> list[Rule]:
    """The same, of the gradients of image, filters and bias."""

    def rule(taken: tuple[Placement, ...], given: tuple[Placement, ...]) -> Rule:
        return Rule(taken, tuple(p if meta else None for p, meta in zip(given, node.outputs)))

    batch = rule((S(0), S(0), R), (S(0), P_SUM, P_SUM))
    if _BACKWARD.is_grouped(node):
        return [batch, rule((S(1), S(1), S(0)), (S(1), S(0), S(0)))]
    if node.args[_TRANSPOSED + 1]:
        return [batch]
    return [batch, rule((S(1), R, S(0)), (P_SUM, S(0), S(0))), rule((R, S(1), S(1)), (S(1), S(1), R))]


def _whole_groups(known: _Convolution, node: Node, inputs: Metas, *given: Any) -> bool:
    """Whether every rank has whole groups, where channels are cut along these."""
    layouts, _, mesh = given
    ranks = math.prod(mesh.shape[axis] for axis in layouts[0].axes_of(1))
    return not known.is_grouped(node) or node.args[known.groups] % ranks == 0


def _convolution_of_shard(call: LocalCall) -> Any:
    """Where the result is addends and the bias whole, the first rank of an axis adds the bias."""
    result = call.outputs[0]
    assert result is not None
    image, filters, bias, *rest, _ = call.args
    added = [at for at, placement in zip(call.coordinate, result) if placement.kind == "P"]
    bias = None if any(added) else bias
    return call.run(call.node.op, image, filters, bias, *rest, _FORWARD.groups_of_shard(call))


def _backward_of_shard(call: LocalCall) -> Any:
    """The length of the bias, an argument, is that of the channels that the rank has a gradient of."""
    grad, image, filters, bias, *rest, _, wanted = call.args
    channels = local_shape(call.metas[0].shape, call.inputs[0], call.mesh, call.coordinate)[1]
    bias = [channels] if call.node.args[-1][2] else bias
    return call.run(call.node.op, grad, image, filters, bias, *rest, _BACKWARD.groups_of_shard(call), wanted)


def _images(match: re.Match[str]) -> Operator:
    dims = int(match[1])
    return Operator(small=partial(_small_image, dims, False), keeps=partial(_keeps_image, dims))


def _operator(known: _Convolution, rules: Rules, local: Local, flops: Flops, *traits: Trait) -> Operator:
    return Operator(
        more_rules=rules,
        suits=partial(_whole_groups, known),
        local=local,
        small=partial(_small_convolution, known),
        keeps=partial(_keeps_convolution, known),
        kernel="convolution",
        flops=flops,
        traits=traits,
    )


def _patch_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Patches of images, and images of patches: the batch, and channels, whose patches lie together."""
    channels = len(inputs[0].shape) - (3 if node.op is aten.im2col.default else 2)
    return [Rule((S(d),), (S(d),)) for d in range(channels + 1)]


def _keeps_patches(node: Node, position: int, dim: int, rank: int) -> bool:
    """Images and patches stay, the channels that patches stand for, too."""
    return dim >= rank - 2


def _keeps_samples(grid: int, node: Node, position: int, dim: int, rank: int) -> bool:
    """Images stay, and the grid (batch, *image, 2) with them."""
    return dim >= (1 if position == grid else 2)


def _sample_rules(node: Node, inputs: Metas) -> list[Rule]:
    """The dims in front, and channels, whose places are the same."""
    front = len(inputs[1].shape) - 3
    return [*(Rule((S(d), S(d)), (S(d),)) for d in range(front)), Rule((S(front), R), (S(front),))]


def _sample_rules_backward(node: Node, inputs: Metas) -> list[Rule]:
    """The same, of the gradients of pictures and places."""
    front = len(inputs[2].shape) - 3
    channels = Rule((S(front), S(front), R), (S(front), P_SUM))
    return [*(Rule((S(d),) * 3, (S(d),) * 2) for d in range(front)), channels]


def _keeps_places(grid: int, node: Node, position: int, dim: int, rank: int) -> bool:
    """Pictures stay, and their places."""
    return dim >= rank - (3 if position == grid else 2)


_SAMPLES = Operator(small=as_it_is, keeps=partial(_keeps_samples, 1))
enter("grid_sampler_2d grid_sampler_3d", _SAMPLES)
enter("grid_sampler_2d_backward grid_sampler_3d_backward", replace(_SAMPLES, keeps=partial(_keeps_samples, 2)))
enter(
    "sample",
    Operator(rules=_sample_rules, small=as_it_is, keeps=partial(_keeps_places, 1)),
    namespace="autoshard",
)
enter(
    "sample_backward",
    Operator(rules=_sample_rules_backward, small=as_it_is, keeps=partial(_keeps_places, 2)),
    namespace="autoshard",
)
enter("im2col col2im", Operator(rules=_patch_rules, small=as_it_is, keeps=_keeps_patches, kernel="copy"))
enter("convolution", _operator(_FORWARD, _channels_cut, _convolution_of_shard, _flops, "contraction"))
enter("convolution_backward", _operator(_BACKWARD, _channels_cut_backward, _backward_of_shard, _backward_flops))
# max_pool2d_with_indices_backward, upsample_nearest_exact1d: the number is that of the dims of an image
enter_pattern(r"(?:pool|pad|upsample|sampler|conv)\w*?([123])d", _images)
