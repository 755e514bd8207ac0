"""Small inputs for an operator of any size, so that its rules can be checked in microseconds.

Every distinct dim length becomes a small one of the same kind: divisible by the number of parts or not, 1 stays 1, and
larger stays larger. Images keep their size. Floating tensors become float64. Arguments that carry lengths follow.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..capture import Node, TensorMeta, map_refs

aten = torch.ops.aten

# operators on images, and how many of their tensors, the first ones, are images (batch, channels, height, width)
_IMAGE_TENSORS = {
    aten.convolution.default: 1,
    aten.convolution_backward.default: 2,
    aten.max_pool2d_with_indices.default: 1,
    aten.max_pool2d_with_indices_backward.default: 3,
    aten.avg_pool2d.default: 1,
    aten.avg_pool2d_backward.default: 2,
    aten._adaptive_avg_pool2d.default: 1,
    aten._adaptive_avg_pool2d_backward.default: 2,
}
_SPLITS = frozenset({aten.split.Tensor, aten.split_with_sizes.default})
_LENGTHS: dict[Any, tuple[int, ...]] = {
    aten.convolution_backward.default: (3,),
    aten.expand.default: (1,),
    aten.native_layer_norm.default: (1,),
    aten.native_layer_norm_backward.default: (2,),
    aten.embedding_dense_backward.default: (2,),
    aten._fused_rms_norm.default: (1,),
    aten._fused_rms_norm_backward.default: (2,),
    aten.new_zeros.default: (1,),
    aten.new_ones.default: (1,),
    aten.new_full.default: (1,),
}


def small(node: Node, inputs: tuple[TensorMeta, ...], parts: int, even: int) -> tuple[Node, tuple[TensorMeta, ...]]:
    """The same operator on small tensors.

    Args:
        parts: the number of ranks of the axis the rule is meant for; decides which lengths count as divisible.
        even: the number of ranks of the small check; small lengths are divisible by it where the large ones were.

    Returns:
        The node with its length arguments replaced (its ``outputs`` are still the large ones) and the small inputs.
    """
    lengths = sorted({size for meta in (*inputs, *(m for m in node.outputs if m)) for size in meta.shape})
    length = _lengths(lengths, parts, even)
    shapes = [
        [size if _keeps(node, k, d) else length[size] for d, size in enumerate(meta.shape)]
        for k, meta in enumerate(inputs)
    ]
    args = _with_lengths(node, _small_cut(node, inputs, shapes), length)
    metas = tuple(TensorMeta(tuple(shape), _wide(meta.dtype)) for shape, meta in zip(shapes, inputs))
    return replace(node, args=_widen(args), kwargs=_widen(node.kwargs)), metas


def _keeps(node: Node, position: int, dim: int) -> bool:
    """Whether a length stays: an image must fit the stride of its kernel, and channels their groups."""
    if node.op not in _IMAGE_TENSORS:
        return False
    grouped = (node.op is aten.convolution.default and node.args[8] > 1) or (
        node.op is aten.convolution_backward.default and node.args[9] > 1
    )
    return dim >= 2 or (grouped and (dim == 1 or position >= _IMAGE_TENSORS[node.op]))


def _lengths(lengths: list[int], parts: int, even: int) -> dict[int, int]:
    result, last = {}, 2
    for size in lengths:
        if size <= 1:
            result[size] = size
            continue
        last += 1
        while (last % even == 0) != (size % parts == 0):
            last += 1
        result[size] = last
    return result


def _with_lengths(node: Node, args: tuple[Any, ...], length: dict[int, int]) -> tuple[Any, ...]:
    def shrink(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(shrink(item) for item in value)
        return length.get(value, value)

    positions = _LENGTHS.get(node.op, ())
    return tuple(shrink(arg) if i in positions else arg for i, arg in enumerate(args))


def _small_cut(node: Node, inputs: tuple[TensorMeta, ...], shapes: list[list[int]]) -> tuple[Any, ...]:
    """Arguments of splits, slices and selects; adjusts the small shapes along the dim they act on."""
    args = node.args
    if node.op in _SPLITS:
        dim = (args[2] if len(args) > 2 else 0) % len(shapes[0])
        size = args[1]
        if isinstance(size, int):
            full, rest = divmod(inputs[0].shape[dim], size)
            shapes[0][dim] = 3 * full + min(rest, 2)
            return (args[0], 3, *args[2:])
        pieces = tuple(min(piece, 3) for piece in size)
        shapes[0][dim] = sum(pieces)
        return (args[0], pieces, *args[2:])
    if node.op is aten.slice.Tensor:
        ref, dim, start, end, step = (*args, *(0, None, None, 1)[len(args) - 1 :])  # type: ignore[misc]
        dim, whole = dim % len(shapes[0]), inputs[0].shape[dim]
        lo, hi = _small_range(start, end, whole, shapes[0][dim])
        return ref, dim, lo, hi, step
    if node.op is aten.slice_backward.default:
        ref, sizes, dim, start, end, step = args
        whole, dim = sizes[dim], dim % len(sizes)
        small_sizes = list(shapes[0])
        small_sizes[dim] = shapes[0][dim] if shapes[0][dim] == whole else 8
        lo, hi = _small_range(start, end, whole, small_sizes[dim])
        shapes[0][dim] = len(range(lo, min(hi, small_sizes[dim]), step))
        return ref, tuple(small_sizes), dim, lo, hi, step
    if node.op is aten.select.int:
        ref, dim, index = args
        return ref, dim, min(index, shapes[0][dim] - 1)
    if node.op is aten.select_backward.default:
        ref, sizes, dim, index = args
        small_sizes = list(shapes[0])
        small_sizes.insert(dim % len(sizes), 4)
        return ref, tuple(small_sizes), dim, min(index, 3)
    return args


def _small_range(start: int | None, end: int | None, whole: int, size: int) -> tuple[int, int]:
    start, end = start or 0, whole if end is None else end
    start, end = (start + whole if start < 0 else start), (end + whole if end < 0 else end)
    lo = 0 if start == 0 else 1
    return lo, size if end >= whole else max(lo + 1, size - 1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else dtype


def _widen(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_widen(item) for item in value)
    return _wide(value) if isinstance(value, torch.dtype) else value


def sample(metas: tuple[TensorMeta, ...], positive: bool, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Random tensors; integers index any dim of the small tensors."""
    bound = min((size for meta in metas for size in meta.shape if size > 1), default=2)
    tensors = []
    for meta in metas:
        if meta.dtype is torch.bool:
            tensors.append(torch.randint(0, 2, meta.shape, generator=generator).bool())
        elif not meta.dtype.is_floating_point:
            tensors.append(torch.randint(0, bound, meta.shape, generator=generator, dtype=meta.dtype))
        elif positive:
            tensors.append(torch.rand(meta.shape, generator=generator, dtype=meta.dtype) + 0.5)
        else:
            tensors.append(torch.randn(meta.shape, generator=generator, dtype=meta.dtype))
    return tuple(tensors)


def apply(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Runs the operator on whole tensors; one entry per result."""
    supply = iter(values)
    args = map_refs(node.args, lambda _: next(supply))
    kwargs = {key: map_refs(value, lambda _: next(supply)) for key, value in node.kwargs}
    assert node.op is not None
    result = node.op(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
