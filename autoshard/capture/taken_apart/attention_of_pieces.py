"""Attention of equal pieces of a sequence, each to itself, whose results are joined again: that of a batch of them.

So do models of pictures, whose patches lie behind each other in one row: ``[attend(*each) for each in zip(*(x.split(
lengths, 2) for x in (q, k, v)))]``. A row that is split has no dim that ranks could share the pictures along.

Shapes: B = 1 batch, H heads, N pieces, T length of each, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import torch.nn.functional as F
from torch import fx

from ..by_numbers.idle_modes import is_mode
from ..by_numbers.masks import memory_of, written_into
from ..examples import name_of, new_call, shape_of, tensor_of
from .moved_pieces import CATS, cut_apart, dim_of_join

_ATTENDED = ("query", "key", "value")
_DIMS = 4
_STEPS = 2
"""The dim of a sequence in queries, keys and values."""

Move = tuple[Any, tuple[Any, ...]]
"""A function that moves dims behind the batch, or none, and its arguments beside the tensor."""


def attend_to_pieces(node: fx.Node) -> bool:
    """Has a join give attention of a batch, if it has that of all pieces in their order; else False."""
    dim = dim_of_join(node) if node.target in CATS else None
    parts: Any = node.args[0] if dim is not None else ()
    found = [_attention_of(part) for part in parts]
    attentions = [each for each in found if each is not None]
    if dim is None or len(attentions) < max(len(found), 2) or any(moves != attentions[0][1] for _, moves in attentions):
        return False
    nodes, moves = [each for each, _ in attentions], attentions[0][1]
    given = [_given(each) for each in nodes]
    wholes = [_whole([each.get(name) for each in given]) for name in _ATTENDED]
    options = [{key: value for key, value in each.items() if key not in _ATTENDED} for each in given]
    if None in wholes or any(each != options[0] for each in options) or not _is_plain(options[0]):
        return False
    written, between = written_into(node.graph), list(takewhile(lambda each: each is not node, _from(nodes[0])))
    if any(memory_of(each) in written for each in (*wholes, *nodes)) or not set(nodes) <= set(between):
        return False
    if any(map(is_mode, between)):
        return False
    with node.graph.inserting_before(nodes[0]):
        made = new_call(
            nodes[0], nodes[0].target, *(_batch(nodes[0], whole, len(nodes)) for whole in wholes), **options[0]
        )
        for function, args in moves:
            made = new_call(nodes[0], function, made, *args)
        if dim > 0:
            beside = new_call(node, "movedim", made, 0, dim - 1)
            made = new_call(node, "unsqueeze", new_call(node, "flatten", beside, dim - 1, dim), 0)
        made = new_call(node, "contiguous", made)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    for each in reversed(between):
        if not each.users and (each in nodes or _moves_behind_batch(each) or _does_nothing(each)):
            node.graph.erase_node(each)
    return True


def _from(node: fx.Node) -> Iterator[fx.Node]:
    while node.op != "root":
        yield node
        node = node.next


def _attention_of(part: Any) -> tuple[fx.Node, list[Move]] | None:
    """The attention of which a tensor is made by moving dims, and how these were; nobody else reads anything of it."""
    moves: list[Move] = []
    while isinstance(part, fx.Node) and len(part.users) == 1 and len(shape_of(part)) == _DIMS:
        if part.target is F.scaled_dot_product_attention:
            return part, moves[::-1]
        if not (_moves_behind_batch(part) or _does_nothing(part)):
            return None
        if not _does_nothing(part):
            moves.append((part.target, part.args[1:]))
        part = part.args[0]
    return None


def _moves_behind_batch(node: fx.Node) -> bool:
    if node.kwargs:
        return False
    if name_of(node) == "contiguous":
        return len(node.args) == 1
    dims = node.args[1:]
    return name_of(node) == "transpose" and all(type(dim) is int and dim % _DIMS for dim in dims)


def _does_nothing(node: fx.Node) -> bool:
    """Whether a node gives the shape again that its tensor has."""
    before, after = tensor_of(node.args[0]) if node.args else None, tensor_of(node)
    if name_of(node) not in ("reshape", "view") or before is None or after is None:
        return False
    return (before.shape, before.dtype) == (after.shape, after.dtype)


def _given(node: fx.Node) -> dict[str, Any]:
    names = (*_ATTENDED, "attn_mask", "dropout_p", "is_causal")
    return {**dict(zip(names, node.args)), **node.kwargs}


def _is_plain(options: dict[str, Any]) -> bool:
    """Whether attention has no mask, and drops nothing."""
    return options.get("attn_mask") is None and options.get("dropout_p", 0.0) == 0 and not _reads(options)


def _reads(options: dict[str, Any]) -> bool:
    return any(isinstance(each, fx.Node) for each in options.values())


def _whole(pieces: list[Any]) -> fx.Node | None:
    """The row of steps of which these are the pieces, all and in their order, and equal."""
    found = cut_apart(pieces)
    if found is None or found[1:] != (_STEPS, False):
        return None
    shape = shape_of(found[0])
    return found[0] if len(shape) == _DIMS and shape[0] == 1 and shape[_STEPS] else None


def _batch(like: fx.Node, whole: Any, count: int) -> fx.Node:
    """A sequence (1, H, N * T, D) as (N, H, T, D)."""
    apart = new_call(like, "unflatten", new_call(like, "squeeze", whole, 0), 1, (count, -1))
    return new_call(like, "transpose", apart, 0, 1)
