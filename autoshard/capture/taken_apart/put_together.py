"""Batches that are taken apart and put together again as they were: ``torch.cat(list(features))``.

Models that take pictures of several sizes keep the features of each in a list, though all are of one. Rows that are
picked one by one, and seen in another shape (``features[k].view(-1, channels)``), are no batch that ranks could share,
so they are not picked. Nor is anything joined to what a new cache of keys has, which is nothing:
``torch.cat([torch.tensor([]), keys], dim=-2)``.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ..by_numbers.masks import memory_of, written_into
from ..examples import example, name_of, shape_of, tensor_of

_JOINS = (torch.cat, torch.concat, torch.concatenate, torch.stack)
_UNBINDS = (torch.unbind, "unbind")
_CUTS = (torch.split, torch.chunk, torch.tensor_split, "split", "chunk", "tensor_split", *_UNBINDS)
_RESHAPES = frozenset("view reshape flatten unflatten squeeze unsqueeze contiguous ravel".split())

Rows = tuple[fx.Node, int, int]
"""A tensor, the first of some rows of it, and the one behind the last of these."""


def put_together(node: fx.Node) -> bool:
    """Rewrites a join in place if it has all rows of one tensor in their order, or one tensor alone; else False."""
    if node.target not in _JOINS or not node.args or not isinstance(node.args[0], (tuple, list)):
        return False
    dims, parts = (*node.args[1:], *node.kwargs.values()), node.args[0]
    whole = _alone(parts, tensor_of(node)) if node.target is not torch.stack else None
    whole = whole or (_all_rows(parts) if not any(dims) else None)
    if whole is None:
        return False
    node.target, node.args, node.kwargs = _together, (whole, tuple(shape_of(node))), {}
    return True


def _alone(parts: Sequence[object], joined: Tensor | None) -> fx.Node | None:
    """The one tensor beside others of no elements and one dim, which torch takes for nothing."""
    found = [part for part in parts if (value := tensor_of(part)) is None or value.shape != (0,)]
    value = tensor_of(found[0]) if len(found) == 1 else None
    is_all = value is not None and joined is not None and (value.shape, value.dtype) == (joined.shape, joined.dtype)
    return found[0] if is_all and isinstance(found[0], fx.Node) else None


def _all_rows(parts: Sequence[object]) -> fx.Node | None:
    """The tensor whose rows these are, all of them and in their order."""
    picked = [_picked(part) for part in parts]
    found = [rows for part in picked if (rows := _rows_of(part)) is not None]
    if len(found) < max(len(parts), 2):
        return None
    wholes, starts, stops = zip(*found)
    are_all = len(set(wholes)) == 1 and (*starts, shape_of(wholes[0])[0]) == (0, *stops)
    return wholes[0] if are_all and not _may_differ(wholes[0], parts, picked) else None


def _picked(part: object) -> object:
    """What a tensor is seen of in another shape, its elements in their order."""
    while isinstance(part, fx.Node) and name_of(part) in _RESHAPES and part.args:
        before, after = tensor_of(part.args[0]), tensor_of(part)
        if before is None or after is None or before.dtype != after.dtype:
            break
        part = part.args[0]
    return part


def _may_differ(whole: fx.Node, parts: Sequence[object], picked: Sequence[object]) -> bool:
    """Whether rows that are seen in another shape, and may be copies, are written into, or what they are of is."""
    seen = [part for part, row in zip(parts, picked) if part is not row]
    written = written_into(whole.graph) if seen else ()
    return any(memory_of(each) in written for each in (whole, *seen))


def _rows_of(part: object) -> Rows | None:
    if not isinstance(part, fx.Node) or part.target is not operator.getitem:
        return None
    whole, index = part.args
    if not isinstance(whole, fx.Node) or type(index) not in (int, slice):
        return None
    rows = range(shape_of(whole)[0]) if shape_of(whole) else None
    if isinstance(index, slice):
        return (whole, rows[index].start, rows[index].stop) if rows and rows[index].step == 1 else None
    assert isinstance(index, int)
    return (whole, rows[index], rows[index] + 1) if rows else _rows_of_piece(whole, index)


def _rows_of_piece(cut: fx.Node, index: int) -> Rows | None:
    """The same of one of the pieces that a function cuts a tensor into."""
    is_unbind = cut.target in _UNBINDS
    if cut.target not in _CUTS or not cut.args or any((*cut.args[1 if is_unbind else 2 :], *cut.kwargs.values())):
        return None
    whole, lengths = cut.args[0], [1 if is_unbind else piece.shape[0] for piece in example(cut)]
    start = sum(lengths[:index])
    return (whole, start, start + lengths[index]) if isinstance(whole, fx.Node) else None


def _together(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.reshape(shape).clone()
