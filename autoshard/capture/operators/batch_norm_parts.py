"""Batch norm in parts, so that the batch can be cut and its statistics are still those of all of it.

Capture writes a batch norm in train mode as three operators, the sum of each channel, the sum of the squares of what
is beside its mean, and what these make of it; and its backward as three, the sum of each channel of the gradient, that
of its products with the numbers that were normed, and what these make of it. Where a rank has some rows, only the sums
travel, a number for each channel: that is SyncBatchNorm
(https://docs.pytorch.org/docs/stable/generated/torch.nn.SyncBatchNorm.html). Where a rank has whole channels the last
operator is torch's own and reads no sums, which are not made.

Shapes: x is (N, C, ...), what is known of channels (C); ``count`` is how many numbers a channel has on all ranks.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from ..graph import TensorMeta
from .few_rows import pieces, wide
from .library import define
from .softmax_parts import Add, MetaOf

aten = torch.ops.aten

_CHANNELS = 1
_TRAINING = aten._native_batch_norm_legit_functional.default
_NO_STATISTICS = aten._native_batch_norm_legit.no_stats


def _dims(x: Tensor) -> list[int]:
    """All dims but the channels."""
    return [d for d in range(x.dim()) if d != _CHANNELS]


def _along(numbers: Tensor, x: Tensor) -> Tensor:
    """A number for each channel, for all of x."""
    return numbers.view(-1, *[1] * (x.dim() - 2))


def _like(x: Tensor) -> Tensor:
    """Memory for a result, with the channels last if they are so in x."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.empty_like(x, memory_format=torch.channels_last if last else torch.contiguous_format)


def _channel_sum(x: Tensor) -> Tensor:
    """The sum of each channel, in float32 (float64 for float64)."""
    return x.sum(_dims(x), dtype=wide(x.dtype))


def _channel_sum_shape(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[_CHANNELS], dtype=wide(x.dtype))


def _channel_squares(x: Tensor, total: Tensor, count: int) -> Tensor:
    """The sum of the squares of ``x - total / count``, by the variance of what is here.

    Of large numbers with a small variance the difference of sums of squares would leave nothing.
    """
    if not x.numel():
        return torch.zeros_like(total)
    here = x.numel() // x.shape[_CHANNELS]
    variance, mean = torch.var_mean(x.to(total.dtype), _dims(x), correction=0)
    return (variance + (mean - total / count).square_()).mul_(here)


def _channel_squares_shape(x: Tensor, total: Tensor, count: int) -> Tensor:
    return torch.empty_like(total)


def _batch_norm_shape(
    x: Tensor,
    total: Tensor,
    squares: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.shape[_CHANNELS]
    return _like(x), x.new_empty(channels, dtype=dtype), x.new_empty(channels, dtype=dtype)


def _batch_norm(
    x: Tensor,
    total: Tensor,
    squares: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    count: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The normed numbers, and the means and inverse deviations that they are normed by, in ``dtype``."""
    mean, scale = total / count, torch.rsqrt(squares / count + eps)
    factor = scale if weight is None else scale * weight
    shift = -mean * factor if bias is None else bias - mean * factor
    found = _like(x)
    for piece in pieces(x, _CHANNELS):
        torch.addcmul(_along(shift, x), x[piece].to(factor.dtype), _along(factor, x), out=found[piece])
    return found, mean.to(dtype), scale.to(dtype)


def _batch_norm_in_training(
    x: Tensor,
    total: Tensor,
    squares: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    count: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The same, and the running statistics, which take the variance of a sample."""
    normed = _batch_norm(x, total, squares, weight, bias, momentum, eps, count, dtype)
    means = (1 - momentum) * running_mean + momentum * (total / count).to(running_mean.dtype)
    variance = (squares / (count - 1)).to(running_var.dtype)
    return *normed, means, (1 - momentum) * running_var + momentum * variance


def _batch_norm_in_training_shape(
    x: Tensor,
    total: Tensor,
    squares: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    count: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    normed = _batch_norm_shape(x, total, squares, weight, bias, momentum, eps, count, dtype)
    return *normed, torch.empty_like(running_mean), torch.empty_like(running_var)


def _channel_products(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """The sum of ``grad * (x - mean) * scale`` of each channel: what a weight would get."""
    found = x.new_zeros(x.shape[_CHANNELS], dtype=wide(x.dtype))
    for piece in pieces(x, _CHANNELS):
        beside = x[piece].to(found.dtype) - _along(mean, x)
        found += beside.mul_(grad[piece]).sum(_dims(x))
    return found.mul_(scale)


def _channel_products_shape(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape[_CHANNELS], dtype=wide(x.dtype))


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    total: Tensor,
    products: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    eps: float,
    wanted: list[bool],
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the weight and of the bias; None for what is not wanted."""
    dtype = total.dtype
    factor = scale.to(dtype) if weight is None else scale.to(dtype) * weight
    back, shift = -factor * scale * products / count, -factor * total / count
    found = _like(grad) if wanted[0] else None
    for piece in pieces(x, _CHANNELS) if found is not None else ():
        beside = x[piece].to(dtype) - _along(mean, x)
        torch.addcmul(_along(shift, x), beside, _along(back, x), out=beside)
        torch.addcmul(beside, grad[piece].to(dtype), _along(factor, x), out=cast(Tensor, found)[piece])
    of = mean.dtype if weight is None else weight.dtype
    given = (found, *(t.to(of, copy=True) if want else None for t, want in zip((products, total), wanted[1:])))
    return cast(tuple[Tensor, Tensor, Tensor], given)


def _batch_norm_backward_shape(
    grad: Tensor,
    x: Tensor,
    total: Tensor,
    products: Tensor,
    mean: Tensor,
    scale: Tensor,
    weight: Tensor | None,
    eps: float,
    wanted: list[bool],
    count: int,
) -> tuple[Tensor, Tensor, Tensor]:
    of = mean.dtype if weight is None else weight.dtype
    like = (_like(grad), torch.empty_like(total, dtype=of), torch.empty_like(total, dtype=of))
    return cast(tuple[Tensor, Tensor, Tensor], tuple(t if want else None for t, want in zip(like, wanted)))


channel_sum = define("channel_sum", _channel_sum, _channel_sum_shape)
channel_squares = define("channel_squares", _channel_squares, _channel_squares_shape)
batch_norm = define("batch_norm", _batch_norm, _batch_norm_shape)
batch_norm_in_training = define("batch_norm_in_training", _batch_norm_in_training, _batch_norm_in_training_shape)
channel_products = define("channel_products", _channel_products, _channel_products_shape)
batch_norm_backward = define("batch_norm_backward", _batch_norm_backward, _batch_norm_backward_shape)


def in_parts(
    op: Any, args: tuple[Any, ...], outputs: tuple[TensorMeta | None, ...], meta_of: MetaOf, add: Add
) -> tuple[Any, tuple[Any, ...], tuple[TensorMeta | None, ...]]:
    """The last of the operators that an operator becomes, with its arguments and results, once the others were added;
    the operator itself where it is no batch norm over a batch.

    Args:
        outputs: the results of the operator; torch's tracing has the first gradient also where nobody wants it.
    """
    if op in (_TRAINING, _NO_STATISTICS):
        trains, *rest = args[-3:]
        x, *others = args[:-3]
        if not trains:
            return op, args, outputs
        numbers = TensorMeta(meta_of(x).shape[_CHANNELS : _CHANNELS + 1], wide(meta_of(x).dtype))
        count = _count(meta_of(x))
        total = add(channel_sum, (x,), numbers)
        squares = add(channel_squares, (x, total, count), numbers)
        made = batch_norm if op is _NO_STATISTICS else batch_norm_in_training
        assert outputs[1] is not None
        return made, (x, total, squares, *others, *rest, count, outputs[1].dtype), outputs
    if op is aten.native_batch_norm_backward.default:
        grad, x, weight, _, _, mean, scale, trains, eps, wanted = args
        outputs = tuple(meta if want else None for meta, want in zip(outputs, wanted))
        if not trains:
            return op, args, outputs
        numbers = TensorMeta(meta_of(x).shape[_CHANNELS : _CHANNELS + 1], wide(meta_of(x).dtype))
        total = add(channel_sum, (grad,), numbers)
        products = add(channel_products, (grad, x, mean, scale), numbers)
        taken = (grad, x, total, products, mean, scale, weight, eps, wanted, _count(meta_of(x)))
        return batch_norm_backward, taken, outputs
    return op, args, outputs


def _count(x: TensorMeta) -> int:
    """How many numbers a channel has."""
    return math.prod(x.shape) // max(1, x.shape[_CHANNELS])
