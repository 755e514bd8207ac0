"""Tensors that are put behind each other and taken apart again, as biases of queries, keys and values are for one
function: who takes such a piece takes the tensor itself. Blocks of the joined tensor are no blocks of the pieces.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.fx import Graph
from torch.fx import Node as FxNode

aten = torch.ops.aten
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def take_pieces_themselves(graph: Graph) -> None:
    """Rewrites a joint graph in place; what nobody reads any more of these falls away."""
    results = graph.output_node()
    for joined in graph.find_nodes(op="call_function", target=aten.cat.default):
        tensors, dim = joined.args[0], _dim(joined, *joined.args[1:], **joined.kwargs)
        values = [tensor.meta.get("val") for tensor in tensors]
        if any(value is None or value.dim() != joined.meta["val"].dim() for value in values):
            continue  # torch passes over an empty one of one dim
        ends = list(accumulate((value.shape[dim] for value in values), initial=0))
        pieces = dict(zip(pairwise(ends), tensors))
        for reader in list(joined.users):
            for place, taken in list(_taken(reader, joined, dim)):
                piece = pieces.get(place)
                if piece is not None and _alike(piece, taken) and not _would_be_given_away(piece, taken, results):
                    taken.replace_all_uses_with(piece)
                    graph.erase_node(taken)
            if reader.target in _SPLITS and not reader.users:
                graph.erase_node(reader)
        if not joined.users:
            graph.erase_node(joined)


def _dim(joined: FxNode, dim: int = 0) -> int:
    count: int = joined.meta["val"].dim()
    return dim % count


def _taken(reader: FxNode, joined: FxNode, dim: int) -> Iterator[tuple[tuple[int, int], FxNode]]:
    """What a reader takes along a dim: from where to where, and the node that has it."""
    size = joined.meta["val"].shape[dim]
    if reader.target is aten.slice.Tensor and reader.args[0] is joined:
        given: list[Any] = [*reader.args[1:], *(0, None, None, 1)[len(reader.args) - 1 :]]
        along, start, end, step = given
        if along % joined.meta["val"].dim() == dim and step == 1 and not reader.kwargs:
            start, end = (_place(each, size) for each in (start or 0, size if end is None else end))
            yield (start, end), reader
    if reader.target in _SPLITS and not reader.kwargs:
        along = reader.args[2] if len(reader.args) > 2 else 0
        if along % joined.meta["val"].dim() != dim:
            return
        ends = list(accumulate((part.shape[dim] for part in reader.meta["val"]), initial=0))
        for each in reader.users:
            if each.target is operator.getitem:
                k: Any = each.args[1]
                yield (ends[k], ends[k + 1]), each


def _place(given: int, size: int) -> int:
    return min(max(given + size if given < 0 else given, 0), size)


def _alike(one: FxNode, other: FxNode) -> bool:
    first, second = one.meta["val"], other.meta["val"]
    return bool(first.shape == second.shape and first.dtype == second.dtype)


def _would_be_given_away(piece: FxNode, taken: FxNode, results: FxNode) -> bool:
    """Whether who calls would hold a tensor of the model's, an argument, or one tensor twice, not one of its own."""
    return results in taken.users and (piece.op == "placeholder" or results in piece.users)
