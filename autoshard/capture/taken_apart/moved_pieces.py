"""Equal pieces of one dim that are joined along another, as one view whose dims are moved.

So are heads made by ``torch.cat(q.split(size, 2), 0)`` or ``torch.stack(q.split(size, 2), 1)``, and put beside each
other again by ``torch.cat(h.split(rows, 0), 2)``. A split has no dim that ranks could share the heads along.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..examples import example, is_unknown, name_of, shape_of

CATS = (torch.cat, torch.concat, torch.concatenate)
_CUTS = frozenset("split chunk tensor_split split_with_sizes unbind".split())


def move_pieces(node: fx.Node) -> bool:
    """Rewrites a join in place if it has all pieces of one dim, which are equal, and of which nothing else is made;
    False where it has not, or joins them along the dim of which they are.
    """
    is_stack, along = node.target is torch.stack, dim_of_join(node)
    pieces: Any = node.args[0] if along is not None else ()
    found = cut_apart(pieces)
    if found is None or along is None or any(len(each.users) > 1 for each in pieces):
        return False
    whole, of, is_unbind = found
    if of == along and not is_unbind and not is_stack:
        return False
    node.target, node.kwargs = moved, {}
    node.args = (whole, of, 0 if is_unbind else len(pieces), along, is_stack)
    return True


def dim_of_join(node: fx.Node) -> int | None:
    """The dim along which a node joins or stacks tensors; None of any other node."""
    if node.target not in (*CATS, torch.stack) or not node.args or not isinstance(node.args[0], (tuple, list)):
        return None
    dim = _dim(node, 1)
    return None if dim is None else dim % len(shape_of(node))


def cut_apart(pieces: Sequence[Any]) -> tuple[fx.Node, int, bool] | None:
    """The tensor whose equal pieces these are, all of them, several, and in their order, the dim of which they are, and
    whether that is gone from them.
    """
    cut = pieces[0].args[0] if len(pieces) > 1 and _is_piece(pieces[0]) else None
    if cut is None or name_of(cut) not in _CUTS or is_unknown(example(cut)) or len(example(cut)) != len(pieces):
        return None
    whole, is_unbind = cut.args[0], name_of(cut) == "unbind"
    of = _dim(cut, 1 if is_unbind else 2)
    in_order = all(_is_piece(each) and each.args == (cut, k) for k, each in enumerate(pieces))
    if of is None or not in_order or len({piece.shape for piece in example(cut)}) > 1:
        return None
    return whole, of % len(shape_of(whole)), is_unbind


def _is_piece(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is operator.getitem and isinstance(node.args[0], fx.Node)


def _dim(node: fx.Node, position: int) -> int | None:
    """The dim that a function is told, 0 where it is told none; None where that is no number."""
    given = node.kwargs.get("dim", node.args[position] if len(node.args) > position else 0)
    return given if type(given) is int and node.kwargs.keys() <= {"dim", "split_size_or_sections", "chunks"} else None


def moved(x: Tensor, dim: int, count: int, along: int, is_stack: bool) -> Tensor:
    """So many pieces of a dim, or all that is along it where ``count`` is 0, in front of another dim, or in it."""
    apart = x.unflatten(dim, (count, -1)) if count else x
    made = apart.movedim(dim, along).clone(memory_format=torch.contiguous_format)
    return made if is_stack else made.flatten(along, along + 1)
