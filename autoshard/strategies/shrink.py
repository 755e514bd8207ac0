"""Small forms of an operator, so that its rules can be checked in microseconds whatever its size.

A small form means what the operator means. The lengths of dims and the integers among the arguments are replaced by one
map that keeps their order: ``tril(x, -1024)`` of a tensor (16, 8192, 8192) becomes ``tril(x, -3)`` of a tensor (4, 6,
6), a band in a square again. The map also keeps how a dim is cut: a small length is divisible by the ranks of the check
where the real one is by the ranks of the axis. Lengths up to 2 stay, and so do integers up to 2, which may be modes.

Where integers relate to lengths in another way, the operator is shrunk by what is known of it: images stay as large as
they are, pieces of splits and ranges of slices follow their dim, and a view keeps its common factors. Floating tensors
become float64, complex ones complex128.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, NamedTuple

import torch

from ..capture import Node, Ref, TensorMeta
from ..layout import block
from ..localize import ARANGES, GROUP_NORMS, VIEWS

aten = torch.ops.aten

Metas = tuple[TensorMeta, ...]
Form = tuple[Node, Metas]
Shrink = Callable[[Node, Metas, list[list[int]], dict[int, int]], tuple[Any, ...]]

_SMALLEST = 2
# Integers of these names say which dims an operator acts on, not how far.
_DIM_NAME = re.compile(r"(\w*_)?(dim|dims|axis)\d?")
# max_pool2d_with_indices_backward, upsample_nearest_exact1d: the number of dims of the images
_IMAGE_NAME = re.compile(r"(?:pool|pad|upsample|sampler|conv)\w*?([123])d")


class _Convolution(NamedTuple):
    """The positions of strides and groups among the arguments, and how many tensors, the first ones, are images."""

    strides: int
    groups: int
    images: int


_CONVOLUTIONS: dict[Any, _Convolution] = {
    aten.convolution.default: _Convolution(3, 8, 1),
    aten.convolution_backward.default: _Convolution(4, 9, 2),
}


def carries_lengths(node: Node) -> bool:
    """Whether integers among the arguments bear on lengths in a way that is not known here."""
    return bool(_carried(node)) or node.op in VIEWS


def small(node: Node, inputs: Metas, parts: int, ranks: int) -> Form | None:
    """The same operator on small tensors; None where no small form is known.

    Args:
        parts: the number of ranks of the axis the rule is meant for; decides which lengths count as divisible.
        ranks: the number of ranks of the small check; small lengths are divisible by it where the large ones are by
            ``parts``.

    Returns:
        The node with its length arguments replaced (its ``outputs`` are still the large ones) and the small inputs.
    """
    if node.op in VIEWS:
        return _small_view(node, inputs, parts, ranks)
    values = {size for meta in (*inputs, *(m for m in node.outputs if m)) for size in meta.shape}
    length = _lengths(values, _carried(node), parts, ranks)
    shapes = [
        [size if _keeps(node, k, d, len(meta.shape)) else length[size] for d, size in enumerate(meta.shape)]
        for k, meta in enumerate(inputs)
    ]
    if node.op in _KNOWN:
        args, kwargs = _KNOWN[node.op](node, inputs, shapes, length), node.kwargs
    elif _image_dims(node):
        args, kwargs = _image_arguments(node, length), node.kwargs
    else:
        args, kwargs = _map_lengths(node, length.__getitem__)
    metas = tuple(TensorMeta(tuple(shape), _wide(meta.dtype)) for shape, meta in zip(shapes, inputs))
    return replace(node, args=_widen(args), kwargs=_widen(kwargs)), metas


def widened(node: Node, inputs: Metas) -> Form:
    """The operator at its real size, in double precision."""
    metas = tuple(TensorMeta(meta.shape, _wide(meta.dtype)) for meta in inputs)
    return replace(node, args=_widen(node.args), kwargs=_widen(node.kwargs)), metas


def _lengths(sizes: set[int], carried: set[int], parts: int, ranks: int) -> dict[int, int]:
    """The small number for every length of a dim and every integer that an argument carries, in the same order."""
    result, last = {size: size for size in sizes | carried if size <= _SMALLEST}, _SMALLEST
    for size in sorted(size for size in sizes | carried if size > _SMALLEST):
        last += 1
        while size in sizes and not _is_cut_alike(size, parts, last, ranks):
            last += 1
        result[size] = last
    return result


def _is_cut_alike(size: int, parts: int, candidate: int, ranks: int) -> bool:
    """Divisible or not, no rank without an index, and one index per rank only where the real one has that."""
    even = size % parts == 0
    if (candidate % ranks == 0) != even or block(candidate, ranks, ranks - 1)[0] == candidate:
        return False
    return not even or candidate > ranks or size == parts


def _carried(node: Node) -> set[int]:
    found: set[int] = set()

    def note(value: int) -> int:
        found.add(value)
        return value

    if node.op not in _KNOWN and not _image_dims(node):
        _map_lengths(node, note)
    return found


def _map_lengths(node: Node, change: Callable[[int], int]) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """Arguments with every integer above 2 that may carry a length replaced; signs are kept."""
    assert node.op is not None
    declared = node.op._schema.arguments
    named = {argument.name: argument for argument in declared}

    def mapped(value: Any, argument: Any) -> Any:
        if _DIM_NAME.fullmatch(argument.name) or "int" not in str(argument.type):
            return value
        if isinstance(value, tuple):
            return tuple(mapped(item, argument) for item in value)
        if type(value) is not int or abs(value) <= _SMALLEST:
            return value
        return change(value) if value > 0 else -change(-value)

    args = tuple(mapped(value, argument) for value, argument in zip(node.args, declared))
    return args, tuple((key, mapped(value, named[key])) for key, value in node.kwargs)


def _image_dims(node: Node) -> int:
    """How many last dims of its tensors are an image, which kernels and strides bear on; 0 for other operators."""
    assert node.op is not None
    if known := _CONVOLUTIONS.get(node.op):
        return len(node.args[known.strides])
    match = _IMAGE_NAME.search(node.op._schema.name)
    return int(match[1]) if match else 0


def _is_grouped(node: Node) -> bool:
    known = _CONVOLUTIONS.get(node.op)
    return known is not None and node.args[known.groups] > 1


def _keeps(node: Node, position: int, dim: int, rank: int) -> bool:
    """Whether a length stays: an image must fit its kernel, channels their groups, and as many rows as results."""
    if node.op is aten.unbind.int:
        return dim == (node.args[1] if len(node.args) > 1 else 0) % rank
    if node.op in GROUP_NORMS:
        return dim == 1 or rank == 1
    images = _image_dims(node)
    if rank > images > 0 and dim >= rank - images:
        return True
    known = _CONVOLUTIONS.get(node.op)
    return known is not None and _is_grouped(node) and (dim == 1 or position >= known.images)


def _image_arguments(node: Node, length: dict[int, int]) -> tuple[Any, ...]:
    """Shapes of whole tensors among the arguments follow batch and channels."""
    assert node.op is not None
    dims = _image_dims(node)
    args = list(node.args)
    for i, (arg, argument) in enumerate(zip(args, node.op._schema.arguments)):
        if argument.name == "input_size":
            args[i] = (*(length[size] for size in arg[:-dims]), *arg[-dims:])
        if argument.name == "bias_sizes" and arg and not _is_grouped(node):
            args[i] = tuple(length.get(size, size) for size in arg)  # (0,) where there is no bias
    return tuple(args)


def _small_view(node: Node, inputs: Metas, parts: int, ranks: int) -> Form | None:
    """A view with every common factor of both shapes made small: (6, 8192) -> (6, 32, 256) has 6, 32 and 256.

    None where a dim of one side ends within a factor of the other, as in (6, 4) -> (8, 3).
    """
    meta = node.outputs[0]
    assert meta is not None
    before, after = inputs[0].shape, meta.shape
    ends = sorted({1, *accumulate(before, mul), *accumulate(after, mul)})
    if 0 in ends or any(end % start for start, end in pairwise(ends)):
        return None
    factors = {end: end // start for start, end in pairwise(ends)}
    length = _lengths(set(factors.values()), set(), parts, ranks)

    def shrunk(shape: tuple[int, ...]) -> tuple[int, ...]:
        spans = pairwise(accumulate(shape, mul, initial=1))
        return tuple(math.prod(length[factors[end]] for end in factors if lo < end <= hi) for lo, hi in spans)

    small_node = replace(node, args=(node.args[0], shrunk(after)))
    return small_node, (TensorMeta(shrunk(before), _wide(inputs[0].dtype)),)


def _small_split(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    dim = (node.args[2] if len(node.args) > 2 else 0) % len(shapes[0])
    size = node.args[1]
    if isinstance(size, int):
        full, rest = divmod(inputs[0].shape[dim], size)
        shapes[0][dim] = 3 * full + min(rest, 2)
        return (node.args[0], 3, *node.args[2:])
    pieces = tuple(min(piece, 3) for piece in size)
    shapes[0][dim] = sum(pieces)
    return (node.args[0], pieces, *node.args[2:])


def _small_slice(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    ref, dim, start, end, step = _filled(node.args, (0, None, None, 1))
    dim = dim % len(shapes[0])
    return (ref, dim, *_small_range(start, end, inputs[0].shape[dim], shapes[0][dim]), step)


def _small_slice_backward(
    node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]
) -> tuple[Any, ...]:
    ref, sizes, dim, start, end, step = node.args
    whole, dim = sizes[dim], dim % len(sizes)
    small_sizes = list(shapes[0])
    small_sizes[dim] = shapes[0][dim] if shapes[0][dim] == whole else 8
    lo, hi = _small_range(start, end, whole, small_sizes[dim])
    shapes[0][dim] = len(range(lo, min(hi, small_sizes[dim]), step))
    return ref, tuple(small_sizes), dim, lo, hi, step


def _small_slice_scatter(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    ref, piece, dim, start, end, step = _filled(node.args, (0, None, None, 1))
    dim = dim % len(shapes[0])
    lo, hi = _small_range(start, end, inputs[0].shape[dim], shapes[0][dim])
    shapes[1][dim] = len(range(lo, min(hi, shapes[0][dim]), step))
    return ref, piece, dim, lo, hi, step


def _filled(args: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with the defaults of the last ones; ``x`` with those of a slice is ``x, 0, None, None, 1``."""
    tensors = sum(isinstance(arg, Ref) for arg in args)
    return (*args, *defaults[len(args) - tensors :])


def _small_range(start: int | None, end: int | None, whole: int, size: int) -> tuple[int, int]:
    start, end = start or 0, whole if end is None else end
    start, end = (start + whole if start < 0 else start), (end + whole if end < 0 else end)
    lo = 0 if start == 0 else 1
    return lo, size if end >= whole else max(lo + 1, size - 1)


def _small_group_norm(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    """Batch N and image HxW follow the tensor; channels and their groups stay."""
    at = GROUP_NORMS[node.op]  # type: ignore[index]
    images = shapes[0] if at == 3 else shapes[1]
    return (*node.args[:at], images[0], images[1], math.prod(images[2:]), *node.args[at + 3 :])


def _small_arange(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    meta = node.outputs[0]
    assert meta is not None
    if len(node.args) == 1:
        return (length[meta.shape[0]],)
    step = node.args[2] if len(node.args) > 2 else 1
    return (node.args[0], node.args[0] + step * length[meta.shape[0]], *node.args[2:])


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _widen(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_widen(item) for item in value)
    return _wide(value) if isinstance(value, torch.dtype) else value


# The small arguments of an operator from its small shapes, which it may correct, and the small number of every length.
_KNOWN: dict[Any, Shrink] = {
    aten.split.Tensor: _small_split,
    aten.split_with_sizes.default: _small_split,
    aten.split_with_sizes_copy.default: _small_split,
    aten.unsafe_split.Tensor: _small_split,
    aten.slice.Tensor: _small_slice,
    aten.slice_backward.default: _small_slice_backward,
    aten.slice_scatter.default: _small_slice_scatter,
    **dict.fromkeys(GROUP_NORMS, _small_group_norm),
    **dict.fromkeys(ARANGES, _small_arange),
}
