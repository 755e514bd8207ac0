"""Choices of experts in a traced forward: among how many, how many there are of each, and of which there are any."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from ..examples import name_of, shape_of

_VIEWS = frozenset("view reshape flatten to long int contiguous detach squeeze".split())
_NOT_ZERO = {("gt", 0), ("greater", 0), ("ne", 0), ("bool",)}


def number_of_experts(chosen: fx.Node) -> int:
    """Among how many is chosen, where the choices of a token are distinct numbers from 0 on; 0 where nobody knows."""
    node: Any = chosen
    while name_of(node) in _VIEWS and node.args:
        node = node.args[0]
    if name_of(node) == "argmax":  # one choice of each token, so that several in a row are of as many tokens
        return _last_size(node) if shape_of(chosen)[1:] in ((), (1,)) else 0
    if node.target is not operator.getitem or node.args[1] != 1 or name_of(node.args[0]) != "topk":
        return 0
    if len(shape_of(chosen)) > 1 and shape_of(chosen)[-1:] != shape_of(node)[-1:]:
        return 0
    return _last_size(node.args[0])


def _last_size(node: fx.Node) -> int:
    """The length of the last dim of what is chosen from, if it is chosen along it; 0 otherwise."""
    scores: Any = node.args[0]
    at = 2 if name_of(node) == "topk" else 1
    dim = node.args[at] if len(node.args) > at else node.kwargs.get("dim", -1 if at == 2 else None)
    dims = len(shape_of(scores))
    return int(shape_of(scores)[-1]) if dim is not None and dims and dim in (-1, dims - 1) else 0


def choices_found(found: fx.Node) -> fx.Node | None:
    """The choices whose experts' numbers a node gives, each once: ``chosen.unique()``, ``(counts > 0).nonzero()``."""
    if len(found.args) != 1 or found.kwargs:
        return None
    given: Any = found.args[0]
    if name_of(found) == "unique":
        return given  # type: ignore[no-any-return]
    while (name_of(given), *given.args[1:]) in _NOT_ZERO and not given.kwargs:
        given = given.args[0]
    return counted(given) if name_of(found) == "nonzero" else None


def counted(counts: Any) -> fx.Node | None:
    """The choices of which a tensor says for each expert how many there are: ``torch.bincount(chosen)``, and sums over
    all other dims of ``F.one_hot(chosen)``.
    """
    if name_of(counts) == "bincount" and len(counts.args) == 1 and not counts.kwargs.keys() - {"minlength"}:
        return counts.args[0]  # type: ignore[no-any-return]
    if name_of(counts) != "sum" or len(counts.args) > 2 or counts.kwargs.keys() - {"dim"}:
        return None
    hot, dims = counts.args[0], counts.args[1] if len(counts.args) > 1 else counts.kwargs.get("dim", ())
    order = list(range(len(shape_of(hot))))
    if name_of(hot) in ("permute", "transpose"):
        order, hot = order_of(hot), hot.args[0]
    left = set(order) - {order[dim] for dim in (dims if isinstance(dims, tuple | list) else [dims])}
    is_counts = name_of(hot) == "one_hot" and left == {len(order) - 1}
    return hot.args[0] if is_counts else None


def is_view(node: Any, of: fx.Node) -> bool:
    """Whether a node gives all that another one gives, in whatever shape."""
    while name_of(node) in ("flatten", "view", "reshape", "long") and node is not of:
        node = node.args[0]
    return node is of


def order_of(node: fx.Node) -> list[int]:
    """The dims of a tensor in the order in which a node has them."""
    count = len(shape_of(node))
    given: Any = node.args[1] if len(node.args) == 2 else node.args[1:]
    dims: list[int] = list(given)
    if name_of(node) == "permute":
        return [dim % count for dim in dims]
    order = list(range(count))
    a, b = (dim % count for dim in dims)
    order[a], order[b] = order[b], order[a]
    return order
