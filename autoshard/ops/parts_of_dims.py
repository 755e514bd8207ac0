"""Dims that a model makes as one and takes apart: queries, keys and values of one projection, a gate beside what it
gates, or the weight of such a projection itself. And batches that a model puts behind each other: two views of each
row, what was chosen and what was rejected.

Such a dim is cut in parts (``S(d/3)``), so that each part is cut as if it were a tensor of its own. Where a graph asks
for that is found here, and what the operators that take dims apart, and join them, make of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from ..capture import CapturedGraph, Node, Ref, TensorMeta
from ..layout import MOST_PARTS, Placement, S, local_shape, pieces
from .lengths import wide
from .operator import Form, LocalCall, Metas, Shape, has, known
from .rule import Rule

aten = torch.ops.aten

_MOVES_DIMS = frozenset({"permute", "transpose", "t", "unsqueeze", "squeeze", "clone", "contiguous", "alias", "detach"})
_KEEPS_ALL = frozenset({"clone", "contiguous", "alias", "detach"})
_CHANGES_ENDS = frozenset({"slice", "constant_pad_nd"})
_JOINS = frozenset({"cat", "repeat", "stack", "expand"})
_RANGE_DEFAULTS = (0, None, None, 1)


def parts_asked_for(graph: CapturedGraph) -> Iterator[tuple[Ref, Placement, int]]:
    """Cuts in parts that the forward of a graph asks for: of what, and the node that takes the dim apart.

    These are dims that are split, of which ranges are taken that fill it, of which one half gates the other, or that a
    view makes two dims of, the first of which is taken apart; and that a matrix product or a convolution made as its
    columns, or that a parameter has, whose parts are matrices or biases of their own.
    """
    for takers, ref, dim, sizes in _taken_apart(graph):
        found = list(_back_to_where_it_begins(graph, ref, dim, sizes))
        if found and found[-1] is None:
            yield from ((at, placement, i) for at, placement in filter(None, found) for i in takers)


def columns_joined(graph: CapturedGraph) -> Iterator[tuple[Ref, Placement]]:
    """Cuts in parts that the forward of a graph asks for as it joins columns and multiplies them with the rows of one
    matrix: heads beside what an MLP made of the same stream. Lengths as of whole numbers to each other are as many
    equal parts, as a parameter may have them.
    """
    for i, node in graph.of_kind("operator"):
        if node.phase != "forward" or _name(node) != "cat":
            continue
        joined = _joined_lengths(node, tuple(map(graph.meta, node.inputs)))
        if joined is None or not 0 < joined[0] == len(graph.meta(Ref(i)).shape) - 1 or not all(joined[1]):
            continue
        dim, lengths = joined
        count = sum(lengths) // math.gcd(*lengths)
        if 1 < len(lengths) <= count <= MOST_PARTS and _meets_a_matrix(graph, i):
            if any(_is_of_columns(graph, ref) for ref in node.inputs):
                yield from ((Ref(i), cut) for cut in dict.fromkeys([S(dim, (1,) * count), S(dim, lengths)]))


def _joined_lengths(node: Node, inputs: Metas) -> tuple[int, tuple[int, ...]] | None:
    """The dim on which tensors are joined, and how long each is there; None beside an empty one of one dim, which torch
    joins to any.
    """
    rank = len(inputs[0].shape)
    if any(len(meta.shape) != rank for meta in inputs):
        return None
    dim = int(node.args[1] if len(node.args) > 1 else dict(node.kwargs).get("dim", 0)) % rank
    return dim, _lengths(inputs, dim)


def _meets_a_matrix(graph: CapturedGraph, index: int) -> bool:
    """Whether the last dim of what a node gives, behind views and operators of each element, is summed in a product
    with one matrix for all.
    """
    length, waiting = graph.meta(Ref(index)).shape[-1], [Ref(index)]
    seen = set(waiting)
    while waiting:
        x = waiting.pop()
        for i in graph.readers.get(x, ()):
            node = graph.nodes[i]
            if node.phase != "forward":
                continue
            if known(node.op).kernel == "matmul":
                left, matrix = node.inputs[-2:]
                if x == left and len(graph.meta(matrix).shape) == 2:
                    return True
            elif _name(node) in _KEEPS_ALL or has(node, "reshape") or torch.Tag.pointwise in node.op.tags:  # type: ignore[union-attr]
                if graph.meta(Ref(i)).shape[-1:] == (length,) and Ref(i) not in seen:
                    seen.add(Ref(i))
                    waiting.append(Ref(i))
    return False


def _is_of_columns(graph: CapturedGraph, ref: Ref) -> bool:
    """Whether a tensor is made of what a product made, by attention, views, ranges and operators of each element."""
    waiting, seen = [ref.node], {ref.node}
    while waiting:
        node = graph.nodes[waiting.pop()]
        if node.kind != "operator":
            continue
        if known(node.op).kernel == "matmul":
            return True
        is_view = has(node, "reshape") or has(node, "split") or _name(node) in _MOVES_DIMS or _name(node) == "slice"
        if is_view or has(node, "attention") or torch.Tag.pointwise in node.op.tags:  # type: ignore[union-attr]
            new = {ref.node for ref in node.inputs} - seen
            waiting += new
            seen |= new
    return False


def batches_joined(graph: CapturedGraph) -> Iterator[tuple[Ref, Placement]]:
    """Cuts in parts that the forward of a graph asks for as it puts batches behind each other, or one so many times: of
    each of them a rank has its rows. So it has where a dim for each of them is folded with its rows: of batches that
    the model stacks, of their gradients, and of a few steps that it turns in front of the batch.
    """
    joined = {ref: parts for ref, parts in _joined(graph) if _is_of_inputs(graph, ref.node)}
    for ref, (count, rows) in joined.items():
        if graph.meta(ref).shape[0] == count * rows:
            yield ref, S(0, (1,) * count)
    for i, node in graph.of_kind("operator"):
        if has(node, "reshape"):
            before, after = graph.meta(node.inputs[0]).shape, graph.meta(Ref(i)).shape
            if not after or after[0] not in (math.prod(before[:end]) for end in range(2, len(before) + 1)):
                continue
            if before[:2] in joined.values() or _is_turned(graph, node.inputs[0]):
                yield Ref(i), S(0, (1,) * before[0])


def _is_turned(graph: CapturedGraph, ref: Ref) -> bool:
    """Whether few steps are in front of the batch, which was in front of them."""
    few, rows = graph.meta(ref).shape[:2]
    if rows != graph.batch or rows < 2 or not 1 < few <= MOST_PARTS:
        return False
    dim, node = 1, graph.nodes[ref.node]
    while node.kind == "operator" and dim == 1:
        before = graph.meta(node.inputs[0]).shape if node.inputs else ()
        if _name(node) in _MOVES_DIMS:
            dim = _moved_from(node, before)[dim]
        elif torch.Tag.pointwise not in node.op.tags or before[:2] != (few, rows):  # type: ignore[union-attr]
            return False
        node = graph.nodes[node.inputs[0].node]
    return dim == 0


def _joined(graph: CapturedGraph) -> Iterator[tuple[Ref, Shape]]:
    """Batches that the forward puts behind each other, or stacks in front of their rows: how many, and the rows of
    each, of which every row of the batch may have become as many, as words have.
    """
    for i, node in graph.of_kind("operator"):
        if node.phase != "forward" or _name(node) not in _JOINS or graph.batch < 2:
            continue
        shapes, after = {graph.meta(ref).shape for ref in node.inputs}, graph.meta(Ref(i)).shape
        rows = {shape[0] if shape else 0 for shape in shapes}
        is_new = {len(after) > len(shape) for shape in shapes} == {True} or rows == {1}
        if len(after) > 1 and is_new and after[0] != graph.batch:
            each, whole = after[1], after[0] * after[1]
        elif len(rows) == 1 and after:
            each, whole = rows.pop(), after[0]
        else:
            continue
        if each and not each % graph.batch and not whole % each and 1 < whole // each <= MOST_PARTS:
            yield Ref(i), (whole // each, each)


def _is_of_inputs(graph: CapturedGraph, index: int) -> bool:
    """Whether an operator reads what is made of an input."""
    waiting, seen = [index], {index}
    while waiting:
        node = graph.nodes[waiting.pop()]
        if node.kind == "input":
            return True
        new = {ref.node for ref in node.inputs} - seen
        waiting += new
        seen |= new
    return False


def _taken_apart(graph: CapturedGraph) -> Iterator[tuple[tuple[int, ...], Ref, int, tuple[int, ...]]]:
    """The nodes of the forward that take a dim apart, the tensor, the dim and the lengths of its parts."""
    ranges: dict[tuple[Ref, int], list[tuple[int, int, int]]] = defaultdict(list)
    for i, node in graph.of_kind("operator"):
        if node.phase != "forward" or not node.inputs:
            continue
        ref = node.inputs[0]
        shape, name = graph.meta(ref).shape, _name(node)
        if has(node, "split") or name == "unsafe_split":
            dim = split_dim(node, len(shape))
            yield (i,), ref, dim, tuple(meta.shape[dim] for meta in node.outputs if meta)
        elif name == "glu":
            dim = _gated_dim(node, len(shape))
            yield (i,), ref, dim, (shape[dim] // 2,) * 2
        elif name in ("select", "unbind"):
            dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape)
            yield (i,), ref, dim, (1,) * shape[dim]
        elif name == "slice":
            dim, start, stop, step = _range(node, shape)
            if step == 1:
                ranges[ref, dim].append((start, stop, i))
    for (ref, dim), taken in ranges.items():
        ends = sorted({(start, stop) for start, stop, _ in taken})
        if [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]:
            if ends[-1][1] == graph.meta(ref).shape[dim]:
                yield tuple(i for *_, i in taken), ref, dim, tuple(stop - start for start, stop in ends)


def _back_to_where_it_begins(
    graph: CapturedGraph, ref: Ref, dim: int, sizes: tuple[int, ...]
) -> Iterator[tuple[Ref, Placement] | None]:
    """The tensors that became this one, the last a parameter or made by a product, with the cut of the dim in parts;
    then None.

    Without it the way ends somewhere else.
    """
    sizes = tuple(filter(None, sizes))
    while 1 < len(sizes) <= MOST_PARTS:
        yield ref, S(dim, sizes)
        node = graph.nodes[ref.node]
        if node.kind != "operator":
            if node.kind == "parameter":
                yield None
            return
        meta = graph.meta(ref)
        if known(node.op).kernel in ("matmul", "convolution"):
            if dim == (1 if known(node.op).kernel == "convolution" else len(meta.shape) - 1):
                yield None
            return
        if (whole := _parts_of_whole(graph, ref, dim, sizes)) is not None:
            ref, sizes = node.inputs[0], (1,) * whole
            continue
        if has(node, "reshape"):
            ref, outer = node.inputs[0], math.prod(meta.shape[:dim])
            before = graph.meta(ref).shape
            fits = [d for d, n in enumerate(before) if n > 1 and math.prod(before[:d]) == outer]
            if not fits or before[fits[-1]] % meta.shape[dim]:
                return
            dim = fits[-1]
            continue
        alike = [r for r in node.inputs if graph.meta(r).shape == meta.shape]
        moved = _moved_from(node, graph.meta(node.inputs[0]).shape) if _name(node) in _MOVES_DIMS else None
        if moved is not None:
            ref, dim = node.inputs[0], moved[dim]
        elif _name(node) in _CHANGES_ENDS and graph.meta(node.inputs[0]).shape[dim] == meta.shape[dim]:
            ref = node.inputs[0]
        elif len(alike) == 1 and torch.Tag.pointwise in node.op.tags:  # type: ignore[union-attr]
            (ref,) = alike
        else:
            return


def _parts_of_whole(graph: CapturedGraph, ref: Ref, dim: int, sizes: tuple[int, ...]) -> int | None:
    """Of a range of a dim in equal parts, of how many such parts the whole dim is; None of anything else, and where
    another range is not of whole parts.
    """
    node, length = graph.nodes[ref.node], graph.meta(ref).shape[dim]
    if not node.inputs or len(set(sizes)) != 1 or length % len(sizes):
        return None
    whole, part = graph.meta(node.inputs[0]).shape, length // len(sizes)
    if (has(node, "split") or _name(node) == "unsafe_split") and split_dim(node, len(whole)) == dim:
        ends = list(accumulate(_lengths(node.outputs, dim)))
    elif _name(node) == "slice" and _range(node, whole)[0] == dim and _range(node, whole)[3] == 1:
        ends = [*_range(node, whole)[1:3], whole[dim]]
    else:
        return None
    return None if whole[dim] == length or any(end % part for end in ends) else whole[dim] // part


def _moved_from(node: Node, shape: tuple[int, ...]) -> list[int]:
    """Of each dim of the result which dim of the tensor it is, -1 for a new one."""
    lengths = [1 if size == 1 else size_of for size_of, size in enumerate(shape, start=2)]
    assert node.op is not None
    result = node.op(torch.empty(lengths, device="meta"), *node.args[1:], **dict(node.kwargs))
    return [lengths.index(size) if size > 1 else -1 for size in result.shape]


def split_dim(node: Node, rank: int) -> int:
    """The dim that a split takes apart."""
    return int(node.args[2] if len(node.args) > 2 else dict(node.kwargs).get("dim", 0)) % rank


def _name(node: Node) -> str:
    assert node.op is not None
    return str(node.op._schema.name.partition("::")[2])


def _range(node: Node, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Dim, start, stop and step of a slice."""
    given: list[Any] = [*node.args[1:], *_RANGE_DEFAULTS[len(node.args) - 1 :]]
    dim, start, stop, step = given
    return _bounded(dim, start, stop, step, shape)


def _range_of_gradient(node: Node) -> tuple[int, int, int, int]:
    """The same of the gradient of a slice, whose first result has the whole dim."""
    sizes, dim, start, stop, step = node.args[1:6]
    return _bounded(dim, start, stop, step, sizes)


def _bounded(dim: int, start: Any, stop: Any, step: int, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    dim %= len(shape)
    lo, hi, _ = slice(start, stop, 1).indices(shape[dim])
    return dim, lo, hi, step


def _lengths(metas: tuple[TensorMeta | None, ...], dim: int) -> tuple[int, ...]:
    return tuple(meta.shape[dim] for meta in metas if meta)


def split_in_parts(node: Node, inputs: Metas, position: int, placement: Placement) -> list[Rule]:
    """A dim that is cut in the parts that it is split into, each of which is cut, or in equal ones of which these are
    made.
    """
    dim = split_dim(node, len(inputs[0].shape))
    lengths = _lengths(node.outputs, dim)
    if position != 0 or placement.dim != dim:
        return []
    if placement == S(dim, lengths):
        return [Rule((placement,), (S(dim),) * len(node.outputs))]
    each = _parts_of(lengths, placement)
    return [Rule((placement,), each)] if each and len(each) == len(node.outputs) else []


def glu_in_parts(node: Node, inputs: Metas, position: int, placement: Placement) -> list[Rule]:
    """A dim of which one half gates the other, and its gradient: both halves are cut, and what is made of them."""
    dim = _gated_dim(node, len(inputs[0].shape))
    cut, made = S(dim, (1, 1)), S(dim)
    rule = Rule((cut,), (made,)) if len(inputs) == 1 else Rule((made, cut), (cut,))
    return [rule] if (*rule.inputs, *rule.outputs)[position] == placement == cut else []


def _gated_dim(node: Node, rank: int) -> int:
    given = node.args[len(node.inputs) :]
    return int(given[0] if given else -1) % rank


def cat_in_parts(node: Node, inputs: Metas, position: int, placement: Placement) -> list[Rule]:
    """Tensors that are cut along the dim on which they are joined: the dim is cut in these parts, or each of them in as
    many as it has of so many equal ones.
    """
    joined = _joined_lengths(node, inputs)
    if joined is None or position != len(inputs) or placement.dim != joined[0]:
        return []
    dim, lengths = joined
    if placement == S(dim, lengths):
        return [Rule((S(dim),) * len(inputs), (placement,))]
    each = _parts_of(lengths, placement)
    return [Rule(each, (placement,))] if each else []


def _parts_of(lengths: tuple[int, ...], placement: Placement) -> tuple[Placement, ...]:
    """How each of the ranges that fill a dim is cut where the dim is cut in parts; none where one cannot be."""
    ends = list(accumulate(lengths, initial=0))
    each = [_part_of(ends[-1], placement, start, stop) for start, stop in pairwise(ends)]
    found = tuple(part for part in each if part)
    return found if len(found) == len(lengths) else ()


def _part_of(size: int, placement: Placement, start: int, stop: int) -> Placement | None:
    """How a range is cut of a dim that is cut in parts: one of these, or as many equal ones; None of other ranges."""
    cut = pieces(size, placement.parts)
    if (start, stop) in cut:
        return S(placement.dim)
    which = _covered(cut, start, stop)
    if which is None or set(placement.parts) != {1}:
        return None
    return S(placement.dim, (1,) * (which[1] - which[0]))


def _covered(cut: list[tuple[int, int]], start: int, stop: int) -> tuple[int, int] | None:
    """The first and behind the last of the parts that a range consists of; None where it is not of whole parts."""
    starts, stops = [start for start, _ in cut], [stop for _, stop in cut]
    return (starts.index(start), stops.index(stop) + 1) if start in starts and stop in stops and start < stop else None


def repeat_in_parts(node: Node, inputs: Metas, position: int, placement: Placement) -> list[Rule]:
    """A tensor that is there several times along a dim: each of them is cut as it is."""
    times = node.args[1]
    dim = placement.dim + len(inputs[0].shape) - len(times)
    is_each = dim >= 0 and placement == S(placement.dim, (1,) * times[placement.dim])
    return [Rule((S(dim),), (placement,))] if position == 1 and is_each else []


def slice_in_parts(node: Node, inputs: Metas, position: int, placement: Placement) -> list[Rule]:
    """A range that is one part of a dim, or several of equal ones."""
    dim, start, stop, step = _range(node, inputs[0].shape)
    if position != 0 or placement.dim != dim or step != 1:
        return []
    made = _part_of(inputs[0].shape[dim], placement, start, stop)
    return [Rule((placement,), (made,))] if made else []


def slice_backward_in_parts(node: Node, inputs: Metas, position: int, placement: Placement) -> list[Rule]:
    """The gradient of a tensor of which one part was taken, or several of equal ones."""
    dim, start, stop, step = _range_of_gradient(node)
    if position != 1 or placement.dim != dim or step != 1:
        return []
    given = _part_of(node.args[1][dim], placement, start, stop)
    return [Rule((given,), (placement,))] if given else []


def reshape_in_parts(node: Node, inputs: Metas, position: int, placement: Placement) -> list[Rule]:
    """The dims that begin where one that is cut in parts does, or, where parts are equal, behind as many of them."""
    meta = node.outputs[0]
    assert meta is not None
    shapes = (inputs[0].shape, meta.shape)
    ours, others = shapes if position == 0 else shapes[::-1]
    outer, count = math.prod(ours[: placement.dim]), len(placement.parts)
    ends = [math.prod(others[:d]) for d in range(len(others))]
    found = [S(d, placement.parts) for d, end in enumerate(ends) if end == outer and others[d] > 1]
    if set(placement.parts) == {1}:
        found += [S(d) for d, end in enumerate(ends) if end == outer * count and others[d] > 1]
    return [Rule((placement,), (p,)) if position == 0 else Rule((p,), (placement,)) for p in found]


def local_split(call: LocalCall) -> Any:
    """The split of a rank's shard; where the dim is cut, its pieces are as long as their shards."""
    dim = split_dim(call.node, len(call.metas[0].shape))
    if not call.inputs[0].axes_of(dim):
        return call.run(call.node.op, *call.args, **call.kwargs)
    pairs = zip(call.node.outputs, call.outputs)
    sizes = [local_shape(m.shape, layout, call.mesh, call.coordinate)[dim] for m, layout in pairs if m and layout]
    op = call.node.op if "split_with_sizes" in _name(call.node) else aten.split_with_sizes.default
    return call.run(op, call.args[0], sizes, dim)


def local_slice(call: LocalCall) -> Any:
    """A range of a rank's shard; where the dim is cut in parts, the rank's block of the part."""
    dim, start, stop, _ = _range(call.node, call.metas[0].shape)
    parts = call.inputs[0].parts_of(dim)
    if not parts:
        return call.run(call.node.op, *call.args, **call.kwargs)
    length = local_shape(call.metas[0].shape, call.inputs[0], call.mesh, call.coordinate)[dim]
    which = _covered(pieces(call.metas[0].shape[dim], parts), start, stop)
    return call.run(aten.slice.Tensor, call.args[0], dim, *_range_in(length, parts, which))


def local_slice_backward(call: LocalCall) -> Any:
    """The gradient of a rank's shard of which a range, or the rank's block of a part, was taken."""
    meta, layout = call.node.outputs[0], call.outputs[0]
    assert meta is not None and layout is not None
    dim, start, stop, step = _range_of_gradient(call.node)
    size = local_shape(meta.shape, layout, call.mesh, call.coordinate)
    parts = layout.parts_of(dim)
    if parts:
        start, stop = _range_in(size[dim], parts, _covered(pieces(meta.shape[dim], parts), start, stop))
        return call.run(call.node.op, call.args[0], size, dim, start, stop, step)
    return call.run(call.node.op, call.args[0], size, *call.args[2:])


def _range_in(length: int, parts: tuple[int, ...], which: tuple[int, int] | None) -> tuple[int, int]:
    """Where some parts begin and end in a dim of a length.

    Raises:
        ValueError: it was no range of whole parts.
    """
    if which is None:
        raise ValueError("a range that is no part of a dim that is cut in parts")
    cut = pieces(length, parts)
    return cut[which[0]][0], cut[which[1] - 1][1]


def small_in_parts(node: Node, inputs: Metas, rule: Rule, ranks: int) -> Form | None:
    """A small call of an operator that takes a dim apart or joins one, in the parts of a rule, each of them cut evenly.

    None of another operator.
    """
    name = _name(node)
    placement = max((p for p in (*rule.inputs, *rule.outputs) if p and p.parts), key=lambda p: len(p.parts))
    if has(node, "attention"):
        return _small_attention_in_parts(node, inputs, len(placement.parts) * ranks)
    dim, lengths = placement.dim, [part * ranks for part in placement.parts]
    whole = [sum(lengths) if d == dim else 2 for d in range(len(inputs[0].shape))]

    def meta(like: TensorMeta, length: int) -> TensorMeta:
        return TensorMeta(tuple(length if d == dim else size for d, size in enumerate(whole)), wide(like.dtype))

    if name == "repeat":
        times = tuple(len(lengths) if d == dim else 1 for d in range(len(whole)))
        return replace(node, args=(node.args[0], times)), (meta(inputs[0], lengths[0]),)
    if name == "cat":
        shapes = [like.shape[dim] for like in inputs]
        ends = list(accumulate(shapes, initial=0))
        ranges = [_small_range(ends[-1], placement, ranks, start, stop) for start, stop in pairwise(ends)]
        return node, tuple(meta(like, stop - start) for like, (start, stop) in zip(inputs, ranges))
    if has(node, "split") or "split" in name:
        ends = list(accumulate(_lengths(node.outputs, dim), initial=0))
        ranges = [_small_range(ends[-1], placement, ranks, start, stop) for start, stop in pairwise(ends)]
        each = [stop - start for start, stop in ranges]
        sizes = each if "split_with_sizes" in name else each[0]
        return replace(node, args=(node.args[0], sizes, dim)), (meta(inputs[0], sum(lengths)),)
    if name in ("glu", "glu_backward"):
        return node, tuple(meta(like, length) for like, length in zip(reversed(inputs), (sum(lengths), *lengths)))[::-1]
    if name == "slice":
        _, start, stop, _ = _range(node, inputs[0].shape)
        start, stop = _small_range(inputs[0].shape[dim], placement, ranks, start, stop)
        return replace(node, args=(node.args[0], dim, start, stop, 1)), (meta(inputs[0], sum(lengths)),)
    if name == "slice_backward":
        _, start, stop, _ = _range_of_gradient(node)
        start, stop = _small_range(node.args[1][dim], placement, ranks, start, stop)
        args = (node.args[0], tuple(whole), dim, start, stop, 1)
        return replace(node, args=args), (meta(inputs[0], stop - start),)
    return None


def _small_attention_in_parts(node: Node, inputs: Metas, length: int) -> Form:
    """Of so many queries, and as many keys; heads as they are to each other."""
    few = min(meta.shape[1] for meta in inputs)
    shapes = ((2, 2 * (meta.shape[1] // few), length, *([4] * len(meta.shape[3:]))) for meta in inputs)
    return node, tuple(TensorMeta(shape, wide(meta.dtype)) for shape, meta in zip(shapes, inputs))


def _small_range(size: int, placement: Placement, ranks: int, start: int, stop: int) -> tuple[int, int]:
    """Where a range of whole parts of a dim begins and ends in a small one, of which each part is of so many indices
    for each rank.
    """
    if start == stop:
        return 0, 0
    length = sum(placement.parts) * ranks
    return _range_in(length, placement.parts, _covered(pieces(size, placement.parts), start, stop))
