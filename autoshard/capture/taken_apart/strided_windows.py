"""Windows along one dim that overlap, of which a model says where they lie in memory (``as_strided``: Longformer).

Shards lie otherwise. But of a tensor that lies in memory without gaps, its dims in some order, the strides say which
elements these are: in some shape of it, windows along one dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..by_numbers.masks import memory_of
from ..examples import example, tensor_of


class Windows(NamedTuple):
    """``x.reshape(shape).unfold(dim, length, step).permute(order).view(size)``, of which the last adds dims of one."""

    shape: tuple[int, ...]
    dim: int
    length: int
    step: int
    order: tuple[int, ...]
    size: tuple[int, ...]


def take_windows(node: fx.Node) -> bool:
    """Rewrites a call of ``as_strided`` in place if it cuts such windows of what the forward has made; else False."""
    if node.target not in (torch.as_strided, "as_strided"):
        return False
    given: dict[str, Any] = dict(zip(("input", "size", "stride", "storage_offset"), node.args)) | node.kwargs
    x, made = tensor_of(given["input"]), memory_of(given["input"])
    size, stride = _numbers(given["size"]), _numbers(given["stride"])
    if x is None or made.op in ("placeholder", "get_attr") or given.get("storage_offset") or not size or not stride:
        return False
    # the dims of the tensor as they lie in memory
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    if not x.permute(order).is_contiguous() or x.storage_offset() or x.is_conj() or x.is_neg():
        return False
    found = windows_of(x.numel(), size, stride)
    if found is not None:
        node.target, node.args = cut, (given["input"], order, *found)
    elif x.numel() == math.prod(size) and stride == torch.empty(size, device="meta").stride():  # there is one window
        node.target, node.args = _in_order, (given["input"], order, size)
    else:
        return False
    node.op, node.kwargs = "call_function", {}
    return True


def _numbers(values: Any) -> tuple[int, ...]:
    """Sizes or strides, some of which may be tensors whose numbers stand in the forward; none where one is unknown."""
    found = [getattr(example(value), "constant", None) if isinstance(value, fx.Node) else value for value in values]
    return () if None in found else tuple(int(value) for value in found if value is not None)


def windows_of(count: int, size: tuple[int, ...], stride: tuple[int, ...]) -> Windows | None:
    """The windows that these sizes and strides cut of so many elements in a row; None where they are no such ones."""
    if 0 in size or 0 in stride:
        return None
    dims = [dim for dim, length in enumerate(size) if length > 1]
    return next(_found(count, size, stride, dims), None)


def _found(count: int, size: tuple[int, ...], stride: tuple[int, ...], dims: list[int]) -> Iterator[Windows]:
    for number, inside in permutations(dims, 2):
        step, rest = divmod(stride[number], stride[inside])
        if rest or step >= size[inside]:
            continue
        # from the outermost to the innermost; the dim that is cut lies where the elements of a window do
        order = sorted((dim for dim in dims if dim != number), key=lambda dim: -stride[dim])
        outside = [count, *(stride[dim] for dim in order)]
        shape = tuple(whole // part for whole, part in pairwise(outside))
        place = order.index(inside)
        is_whole = all(
            whole == part * size[dim] for dim, (whole, part) in zip(order, pairwise(outside)) if dim != inside
        )
        is_cut = outside[place] == shape[place] * stride[inside] and stride[order[-1]] == 1
        if is_whole and is_cut and (shape[place] - size[inside]) // step + 1 == size[number]:
            places = [*(number if dim == inside else dim for dim in order), inside]
            turned = tuple(places.index(dim) for dim in dims)
            yield Windows(shape, place, size[inside], step, turned, size)


def cut(
    x: Tensor,
    memory: Sequence[int],
    shape: tuple[int, ...],
    dim: int,
    length: int,
    step: int,
    order: tuple[int, ...],
    size: tuple[int, ...],
) -> Tensor:
    """:class:`Windows` of a tensor whose dims lie in memory in some order."""
    found = _in_order(x, memory, shape).unfold(dim, length, step).permute(order)
    return found.view(size) if found.dim() < len(size) else found


def _in_order(x: Tensor, memory: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    return x.permute(tuple(memory)).reshape(shape)
