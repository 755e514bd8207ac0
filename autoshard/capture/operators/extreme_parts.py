"""The largest and the least number over the batch in two parts, so that the batch can be cut.

A rank has the largest number of its rows, and an all-reduce finds that of all; but a collective loses a NaN or not by
the order of the ranks. So what travels is a whole number for each: those of the same order as the floating ones, with
NaN above all. Where nothing that they go over is cut, the last operator is torch's own and does not read the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..graph import TensorMeta
from .few_rows import wide
from .library import define
from .softmax_parts import Add, MetaOf

aten = torch.ops.aten

_WHOLE = {torch.float32: torch.int32, torch.float64: torch.int64}
"""The whole numbers of as many bits."""


def _turned(bits: Tensor) -> Tensor:
    """The bits of floating numbers as whole numbers of the same order, and back: of what is below zero, whose whole
    numbers are in the opposite order, all bits but the sign are turned over.
    """
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)


def _as_whole(x: Tensor, dims: list[int], keepdim: bool, is_least: bool) -> Tensor:
    """The largest number, or the least with its sign turned, as a whole number of the same order.

    Args:
        dims: what it is the largest over.
    """
    found = -torch.amin(x, dims, keepdim) if is_least else torch.amax(x, dims, keepdim)
    found = found.to(wide(x.dtype)).contiguous()
    return _turned(found.masked_fill(found.isnan(), torch.nan).view(_WHOLE[found.dtype]))


def _as_whole_shape(x: Tensor, dims: list[int], keepdim: bool, is_least: bool) -> Tensor:
    return torch.amax(x, dims, keepdim).to(_WHOLE[wide(x.dtype)])


def _extreme(x: Tensor, whole: Tensor, dims: list[int], keepdim: bool, is_least: bool) -> Tensor:
    """The number that a whole number stands for, in the dtype of ``x``, which is there for that."""
    found = _turned(whole).view(wide(x.dtype)).to(x.dtype)
    return -found if is_least else found.clone()


def _extreme_shape(x: Tensor, whole: Tensor, dims: list[int], keepdim: bool, is_least: bool) -> Tensor:
    return torch.empty_like(whole, dtype=x.dtype)


as_whole = define("as_whole", _as_whole, _as_whole_shape)
extreme = define("extreme", _extreme, _extreme_shape)


def in_parts(op: Any, args: tuple[Any, ...], meta_of: MetaOf, add: Add) -> tuple[Any, tuple[Any, ...]]:
    """The last of the operators that an operator becomes, with its arguments, once the other was added; the operator
    itself where it is no extreme of floating numbers over dim 0.
    """
    is_least = op is aten.amin.default or op is aten.min.default
    if not is_least and op is not aten.amax.default and op is not aten.max.default:
        return op, args
    x, given, keepdim = (*args, (), False)[:3] if len(args) < 3 else args
    meta = meta_of(x)
    rank = len(meta.shape)
    dims = tuple(sorted({d % rank for d in given or range(rank)})) if rank else ()
    if 0 not in dims or not meta.dtype.is_floating_point:
        return op, args
    sizes = (1 if d in dims else size for d, size in enumerate(meta.shape) if keepdim or d not in dims)
    how = (dims, bool(keepdim), is_least)
    whole = add(as_whole, (x, *how), TensorMeta(tuple(sizes), _WHOLE[wide(meta.dtype)]))
    return extreme, (x, whole, *how)
