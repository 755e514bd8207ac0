"""Views: reshapes, squeezes, pieces and ranges of a dim, annotations.

A cut dim of the input of a reshape stays one cut dim of the result exactly when both cuts take the same elements
(:func:`aligned`), uneven shards included. On a shard, a squeeze drops the dims that are 1 in the whole tensor, not
those of which the rank has one index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

import torch

from ..capture import Node, Ref, TensorMeta
from ..layout import MOST_PARTS, P_SUM, Layout, Placement, R, S, is_even, local_ranges, local_shape
from ..mesh import Mesh
from .lengths import small_lengths, wide
from .local import on_contiguous, with_local_size
from .operator import Form, LocalCall, Metas, Operator, Shape, enter
from .parts_of_dims import (
    local_slice,
    local_slice_backward,
    local_split,
    repeat_in_parts,
    reshape_in_parts,
    slice_backward_in_parts,
    slice_in_parts,
    split_in_parts,
)
from .rule import Rule

aten = torch.ops.aten

_Taken = tuple[int, tuple[tuple[int, int], ...]]
"""The length of a dim, and the ranges of it that a rank has."""


def _reshape_rules(node: Node, inputs: Metas) -> list[Rule]:
    meta = node.outputs[0]
    assert meta is not None
    before, after = inputs[0].shape, meta.shape
    rules = [Rule((P_SUM,), (P_SUM,))]
    for i, size in enumerate(before):
        outer = math.prod(before[:i])
        for j, other in enumerate(after):
            if size > 1 and other > 1 and math.prod(after[:j]) == outer:
                rules.append(Rule((S(i),), (S(j),)))
    return rules


def _rows_cut_further(node: Node, inputs: Metas) -> list[Rule]:
    """Dim 1 of (B, T, ...) and the rows of (B * T, ...): the same blocks where other axes leave a rank one row of B."""
    meta = node.outputs[0]
    assert meta is not None
    before, after = inputs[0].shape, meta.shape
    rules = [Rule((S(1),), (S(0),))] if are_rows_of(after, before) else []
    return [*rules, Rule((S(0),), (S(1),))] if are_rows_of(before, after) else rules


def _rows_cut_further_in_parts(node: Node, inputs: Metas, position: int, placement: Placement) -> list[Rule]:
    """The same where other axes leave a rank several rows, of each of which it has a block, or one of each part."""
    meta = node.outputs[0]
    assert meta is not None
    shapes, found, parts = (inputs[0].shape, meta.shape), [], len(placement.parts)
    for flat, apart in ((0, 1), (1, 0)):
        if set(placement.parts) != {1} or not are_rows_of(shapes[flat], shapes[apart]):
            continue
        rows = [k for k in range(1, shapes[apart][0] + 1) if shapes[apart][0] % k == 0]
        if position == apart and placement.dim == 1:
            pairs = [(placement, S(0, (1,) * (k * parts))) for k in rows if k * parts <= MOST_PARTS]
        elif position == flat and placement.dim == 0:
            pairs = [(S(1, (1,) * (parts // k)), placement) for k in rows if parts % k == 0]
        else:
            continue
        found += [Rule((a,), (b,)) if apart == 0 else Rule((b,), (a,)) for a, b in pairs]
    return found


def are_rows_of(flat: Shape, shape: Shape) -> bool:
    """Whether a shape (B * T, ...) takes the first two dims of (B, T, ...) together, of which none is 1."""
    return len(shape) > 1 and min(shape[:2]) > 1 and flat[:1] == (shape[0] * shape[1],)


def _is_aligned(
    node: Node, metas: Metas, inputs: tuple[Layout, ...], outputs: tuple[Layout | None, ...], mesh: Mesh
) -> bool:
    meta, after = node.outputs[0], outputs[0]
    assert meta is not None and after is not None
    return aligned(metas[0].shape, inputs[0], meta.shape, after, mesh)


def aligned(before: tuple[int, ...], a: Layout, after: tuple[int, ...], b: Layout, mesh: Mesh) -> bool:
    """Whether reshaping every rank's shard in layout ``a`` gives its shard in layout ``b``.

    That is where both take the same elements, in row-major order, on every rank. Of even cuts, whose blocks start at
    multiples of their width, the first two ranks along every axis tell it.
    """
    even = is_even(before, a, mesh) and is_even(after, b, mesh)
    coordinates = _first_ranks(mesh) if even else mesh.coordinates()
    return all(_elements(before, a, mesh, c) == _elements(after, b, mesh, c) for c in coordinates)


def _first_ranks(mesh: Mesh) -> list[tuple[int, ...]]:
    return [tuple(min(int(i == axis), size - 1) for i, size in enumerate(mesh.shape)) for axis in range(-1, mesh.ndim)]


def _elements(shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> list[_Taken]:
    """The elements of a rank in row-major order, with as few dims as can say it: a dim goes into the one in front of it
    where all of it is taken, or where of that one there is one index.
    """
    found: list[_Taken] = [(1, ((0, 1),))]
    for size, ranges in _ranges(shape, layout, mesh, coordinate):
        outer, taken = found[-1]
        if ranges == ((0, size),):
            found[-1] = (outer * size, tuple((lo * size, hi * size) for lo, hi in taken))
        elif len(taken) == 1 and taken[0][1] - taken[0][0] == 1:
            before = taken[0][0] * size
            found[-1] = (outer * size, tuple((before + start, before + stop) for start, stop in ranges))
        else:
            found.append((size, ranges))
    return found


def _ranges(shape: tuple[int, ...], layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> Iterator[_Taken]:
    """Of each dim what a rank has; one that is cut in equal parts is two, the first of which is taken whole, and one
    more in front where outer axes cut it as one before.
    """
    for dim, size in enumerate(shape):
        ranges, parts = tuple(local_ranges(size, layout, dim, mesh, coordinate)), layout.parts_of(dim)
        if parts and set(parts) == {1}:
            outer = math.prod(mesh.shape[axis] for axis in layout.outer_axes_of(dim))
            which, start = divmod(ranges[0][0], size // outer)
            if outer > 1:
                yield outer, ((which, which + 1),)
            yield len(parts), ((0, len(parts)),)
            yield size // outer // len(parts), ((start, start + ranges[0][1] - ranges[0][0]),)
        else:
            yield size, ranges


def _small_reshape(node: Node, inputs: Metas, parts: int, ranks: int) -> Form | None:
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
    length = small_lengths(set(factors.values()), set(), parts, ranks)

    def shrunk(shape: tuple[int, ...]) -> tuple[int, ...]:
        spans = pairwise(accumulate(shape, mul, initial=1))
        return tuple(math.prod(length[factors[end]] for end in factors if lo < end <= hi) for lo, hi in spans)

    small_node = replace(node, args=(node.args[0], shrunk(after)))
    return small_node, (TensorMeta(shrunk(before), wide(inputs[0].dtype)),)


def _squeezed(call: LocalCall) -> Any:
    shape, args = call.metas[0].shape, call.node.args
    dims = args[1] if len(args) > 1 else tuple(range(len(shape)))
    dims = (dims,) if isinstance(dims, int) else dims
    return call.run(aten.squeeze.dims, call.args[0], tuple(dim for dim in dims if shape and shape[dim] == 1))


def _same(call: LocalCall) -> Any:
    """The tensor itself: nothing runs for an annotation."""
    return call.args[0]


def _constrain_rules(node: Node, inputs: Metas) -> list[Rule]:
    return [Rule((p,), (p,)) for p in (P_SUM, *(S(d) for d in range(len(inputs[0].shape))))]


def _keeps_pieces(node: Node, position: int, dim: int, rank: int) -> bool:
    """The dim that is taken apart stays: it has as many indices as the operator has results."""
    return bool(dim == (node.args[1] if len(node.args) > 1 else 0) % rank)


def _expand_rules(node: Node, inputs: Metas) -> list[Rule]:
    """A dim along which numbers are repeated: every rank repeats them as often as its block wants."""
    meta, before = node.outputs[0], inputs[0].shape
    assert meta is not None
    new = len(meta.shape) - len(before)
    repeated = [d for d, size in enumerate(meta.shape) if size > 1 and (d < new or before[d - new] == 1)]
    return [Rule((R,), (S(d),)) for d in repeated]


def _repeated_local(call: LocalCall) -> Any:
    """``repeat`` to the rank's block: along a dim of one index as often as the block is long."""
    meta, layout = call.node.outputs[0], call.outputs[0]
    assert meta is not None and layout is not None
    sizes = local_shape(meta.shape, layout, call.mesh, call.coordinate)
    before = (1,) * (len(sizes) - len(call.metas[0].shape)) + call.metas[0].shape
    times = tuple(size if one == 1 else count for size, one, count in zip(sizes, before, call.node.args[1]))
    return call.run(call.node.op, call.args[0], times)


def _window_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Windows, and the gradient of a tensor of which they are: any dim but those of the windows."""
    windowed, rank = _window_dim(node, len(inputs[0].shape)), len(inputs[0].shape)
    dims = range(rank - 1 if _is_gradient(node) else rank)
    return [Rule((P_SUM,), (P_SUM,)), *(Rule((S(d),), (S(d),)) for d in dims if d != windowed)]


def _is_gradient(node: Node) -> bool:
    return node.op is aten.unfold_backward.default


def _window_dim(node: Node, rank: int) -> int:
    """The dim that is cut into windows; of those the length is the last dim, behind the others."""
    dims = rank - 1 if _is_gradient(node) else rank
    return int(node.args[2 if _is_gradient(node) else 1]) % max(dims, 1)


def _keeps_windows(node: Node, position: int, dim: int, rank: int) -> bool:
    return dim == _window_dim(node, rank) or (_is_gradient(node) and dim == rank - 1)


def _small_windows(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    if not _is_gradient(node):
        return node.args
    windowed, sizes = _window_dim(node, len(shapes[0])), node.args[1]
    return (node.args[0], tuple(sizes[d] if d == windowed else shapes[0][d] for d in range(len(sizes))), *node.args[2:])


def _diagonal_rules(embeds: bool, node: Node, inputs: Metas) -> list[Rule]:
    """A diagonal, and a tensor with one: any dim but those of the diagonal."""
    meta = node.outputs[0]
    assert meta is not None
    given = node.args[2 if node.op is aten.diagonal_backward.default else 1 :]  # behind the sizes
    default = (0, -2, -1) if node.op is aten.diag_embed.default else (0, 0, 1)
    pairs = _beside_diagonal(len(meta.shape if embeds else inputs[0].shape), given, default)
    rules = [Rule((S(a),), (S(b),)) if embeds else Rule((S(b),), (S(a),)) for a, b in pairs]
    return [Rule((P_SUM,), (P_SUM,)), *rules]


def _diagonal_scatter_rules(node: Node, inputs: Metas) -> list[Rule]:
    """A tensor and another for its diagonal: the same dims of both."""
    pairs = _beside_diagonal(len(inputs[0].shape), node.args[2:], (0, 0, 1))
    return [Rule((P_SUM, P_SUM), (P_SUM,)), *(Rule((S(b), S(a)), (S(b),)) for a, b in pairs)]


def _beside_diagonal(rank: int, given: tuple[int, ...], default: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    """The dims that a diagonal has beside that along it, each with the dim that it is of the tensor with so many dims.

    Args:
        given: the offset and the two dims of the diagonal, as far as they are given, and what they are otherwise.
    """
    diagonal = {dim % rank for dim in (*given, *default[len(given) :])[1:]}
    return enumerate(d for d in range(rank) if d not in diagonal)


def _select_scatter_rules(node: Node, inputs: Metas) -> list[Rule]:
    """A tensor and another for one index of a dim: any other dim, or that one, which no two ranks have the index of."""
    rank = len(inputs[0].shape)
    dim = node.args[2] % rank
    others = (d for d in range(rank) if d != dim)
    along = [Rule((P_SUM, P_SUM), (P_SUM,)), Rule((S(dim), R), (S(dim),))]
    return [*along, *(Rule((S(b), S(a)), (S(b),)) for a, b in enumerate(others))]


def _select_scatter(call: LocalCall) -> Any:
    """The other tensor where the rank has the index; its shard as it was on the ranks that have not."""
    x, other, dim, index = call.args
    shape, start = call.metas[0].shape, 0
    dim, index = dim % len(shape), index % shape[dim]
    for lo, hi in local_ranges(shape[dim], call.inputs[0], dim, call.mesh, call.coordinate):
        if lo <= index < hi:
            return call.run(call.node.op, x, other, dim, start + index - lo)
        start += hi - lo
    return call.run(aten.clone.default, x)


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


def _both_addends(node: Node, inputs: Metas) -> list[Rule]:
    return [Rule((P_SUM, P_SUM), (P_SUM,))]


def _filled(args: tuple[Any, ...], defaults: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments with the defaults of the last ones; ``x`` with those of a slice is ``x, 0, None, None, 1``."""
    tensors = sum(isinstance(arg, Ref) for arg in args)
    return (*args, *defaults[len(args) - tensors :])


def _small_range(start: int | None, end: int | None, whole: int, size: int) -> tuple[int, int]:
    start, end = start or 0, whole if end is None else end
    start, end = (start + whole if start < 0 else start), (end + whole if end < 0 else end)
    lo = 0 if start == 0 else 1
    return lo, size if end >= whole else max(lo + 1, size - 1)


def _of_resolved(call: LocalCall) -> Any:
    """Of complex numbers as they are: a conjugate that torch has not made yet has no pairs of its own. In one process
    two conjugates of a tensor are that tensor; here the first may have been sent, and is made.
    """
    x = call.args[0]
    is_lazy = call.caller.value(x).is_conj()
    return call.run(call.node.op, call.run(aten.resolve_conj.default, x) if is_lazy else x)


_RESHAPE = Operator(
    rules=_reshape_rules,
    rules_beside_others=_rows_cut_further,
    in_parts_beside_others=_rows_cut_further_in_parts,
    in_parts=reshape_in_parts,
    fits=_is_aligned,
    local=with_local_size(1, aten.reshape.default),
    small_form=_small_reshape,
    traits=("reshape",),
)
enter("view reshape", _RESHAPE)
enter("_unsafe_view", replace(_RESHAPE, traits=("reshape", "view")))
enter("constrain", Operator(rules=_constrain_rules, local=_same, traits=("view",)), namespace="autoshard")
enter("expand", Operator(more_rules=_expand_rules, local=with_local_size(1)))
enter(
    "repeat",
    Operator(
        more_rules=_expand_rules, in_parts=repeat_in_parts, local=_repeated_local, kernel="copy", traits=("linear",)
    ),
)
enter("squeeze squeeze_copy", Operator(more_rules=_reshape_rules, local=_squeezed))
enter("view_as_complex view.dtype", Operator(local=on_contiguous(0)))
enter("view_as_real", Operator(local=_of_resolved))
enter("unfold", Operator(rules=_window_rules, small=_small_windows, keeps=_keeps_windows))
enter(
    "unfold_backward",
    Operator(rules=_window_rules, local=with_local_size(1), small=_small_windows, keeps=_keeps_windows, kernel="copy"),
)
enter("diagonal", Operator(rules=partial(_diagonal_rules, False)))
enter("diagonal_copy", Operator(rules=partial(_diagonal_rules, False), kernel="copy"))
enter("diagonal_scatter", Operator(rules=_diagonal_scatter_rules, kernel="copy", traits=("linear",)))
enter("diag_embed", Operator(rules=partial(_diagonal_rules, True), kernel="copy"))
enter("diagonal_backward", Operator(rules=partial(_diagonal_rules, True), local=with_local_size(1), kernel="copy"))
enter("unbind", Operator(keeps=_keeps_pieces))
_SPLIT = Operator(in_parts=split_in_parts, local=local_split, small=_small_split)
enter("split split_with_sizes", replace(_SPLIT, traits=("split",)))
enter("split_with_sizes_copy unsafe_split", _SPLIT)
enter("slice", Operator(in_parts=slice_in_parts, local=local_slice, small=_small_slice, traits=("part",)))
enter("select", Operator(traits=("part",)))
enter(
    "slice_backward",
    Operator(
        in_parts=slice_backward_in_parts,
        local=local_slice_backward,
        small=_small_slice_backward,
        kernel="copy",
        traits=("linear",),
    ),
)
enter(
    "select_scatter",
    Operator(rules=_select_scatter_rules, local=_select_scatter, kernel="copy", traits=("linear",)),
)
enter("select_backward", Operator(local=with_local_size(1), kernel="copy", traits=("linear",)))
enter(
    "slice_scatter",
    Operator(more_rules=_both_addends, small=_small_slice_scatter, kernel="copy", traits=("linear",)),
)
