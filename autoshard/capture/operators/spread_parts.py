"""Variances and standard deviations in parts, so that a dim that they go over can be cut.

Torch takes a variance in one pass over all of its numbers, so that a rank that has some of them has nothing to give. In
parts it is the mean, and then the mean of squared distances from that: of each row two numbers travel. Where rows are
whole the last operator is torch's own and reads none of the others, which do not run.

Shapes: a row is what lies along ``dims``; numbers for rows have length 1 there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..graph import TensorMeta
from .few_rows import wide
from .library import define
from .softmax_parts import Add, MetaOf

aten = torch.ops.aten


def _row_mean(x: Tensor, dims: list[int], count: int) -> Tensor:
    """What the numbers of a rank add to the mean of each row of so many, in float32 (float64 for float64)."""
    return x.sum(dims, keepdim=True, dtype=wide(x.dtype)) / count


def _row_mean_shape(x: Tensor, dims: list[int], count: int) -> Tensor:
    return x.sum(dims, keepdim=True, dtype=wide(x.dtype))


def _row_variance(x: Tensor, mean: Tensor, dims: list[int], divisor: float) -> Tensor:
    """What the numbers of a rank add to the variance of each row: their squared distances from its mean, which is as
    far from their own mean for all of them.
    """
    own, own_mean = torch.var_mean(x.to(mean.dtype), dims, correction=0, keepdim=True)
    count = math.prod(x.shape[d] for d in dims)
    return (own + (own_mean - mean).square()) * (count / divisor)


def _row_variance_shape(x: Tensor, mean: Tensor, dims: list[int], divisor: float) -> Tensor:
    return torch.empty_like(mean)


def _spread(
    x: Tensor, mean: Tensor, variance: Tensor, dims: list[int], correction: float, keepdim: bool, is_root: bool
) -> Tensor:
    """The variance of each row, or the root of it, in the dtype of ``x``, which is there for that."""
    return _given(variance.sqrt() if is_root else variance.clone(), x, dims, keepdim)


def _spread_shape(
    x: Tensor, mean: Tensor, variance: Tensor, dims: list[int], correction: float, keepdim: bool, is_root: bool
) -> Tensor:
    return torch.empty_like(_given(variance, x, dims, keepdim))


def _spread_and_mean(
    x: Tensor, mean: Tensor, variance: Tensor, dims: list[int], correction: float, keepdim: bool, is_root: bool
) -> tuple[Tensor, Tensor]:
    """The same, and the mean of each row."""
    found = _spread(x, mean, variance, dims, correction, keepdim, is_root)
    return found, _given(mean.clone(), x, dims, keepdim)


def _spread_and_mean_shape(
    x: Tensor, mean: Tensor, variance: Tensor, dims: list[int], correction: float, keepdim: bool, is_root: bool
) -> tuple[Tensor, Tensor]:
    found = _spread_shape(x, mean, variance, dims, correction, keepdim, is_root)
    return found, torch.empty_like(found)


def _given(numbers: Tensor, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return (numbers if keepdim else numbers.squeeze(dims)).to(x.dtype)


row_mean = define("row_mean", _row_mean, _row_mean_shape)
row_variance = define("row_variance", _row_variance, _row_variance_shape)
spread = define("spread", _spread, _spread_shape)
spread_and_mean = define("spread_and_mean", _spread_and_mean, _spread_and_mean_shape)


def in_parts(
    op: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], meta_of: MetaOf, add: Add
) -> tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """The last of the operators that an operator becomes, with its arguments, once the others were added;
    the operator itself where it is no variance or deviation, or one of fewer numbers than it is corrected by.
    """
    is_root = op is aten.std.correction or op is aten.std_mean.correction
    with_mean = op is aten.var_mean.correction or op is aten.std_mean.correction
    if not is_root and not with_mean and op is not aten.var.correction:
        return op, args, kwargs
    x, given, options = args[0], args[1] if len(args) > 1 else None, dict(kwargs)
    shape, dtype = meta_of(x).shape, meta_of(x).dtype
    dims = tuple(sorted({d % len(shape) for d in (range(len(shape)) if given is None else given)})) if shape else ()
    count = math.prod(shape[d] for d in dims)
    correction = 1.0 if options.get("correction") is None else float(options["correction"])
    if not dims or count <= correction or not dtype.is_floating_point:
        return op, args, kwargs
    numbers = TensorMeta(tuple(1 if d in dims else size for d, size in enumerate(shape)), wide(dtype))
    mean = add(row_mean, (x, dims, count), numbers)
    variance = add(row_variance, (x, mean, dims, count - correction), numbers)
    taken = (x, mean, variance, dims, correction, bool(options.get("keepdim")), is_root)
    return spread_and_mean if with_mean else spread, taken, ()
