"""Choices of experts in a traced forward: among how many, how many there are of each, and of which there are any."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..examples import are_lengths, name_of, shape_of, tensor_of

_VIEWS = frozenset("view reshape flatten to long int contiguous detach squeeze".split())
_AS_INTEGERS = frozenset("to long int unsqueeze view reshape".split())
_NOT_ZERO = {("gt", 0), ("greater", 0), ("ne", 0), ("bool",)}


@dataclass(frozen=True)
class Choices:
    """Numbers of experts, seen as of a ``shape``: a pair of a token and its expert for each. Where ``kept`` is there,
    numbers for every pair and every expert, of which those of its own expert alone may be other than zero, pairs that
    have a zero there are dropped: they are of no expert.
    """

    chosen: fx.Node
    shape: tuple[int, ...]
    kept: fx.Node | None = None


def choices_told(hot: Any) -> Choices | None:
    """The choices of which a tensor says, in its last dim, which expert each is of: ``F.one_hot(chosen)``, and that
    times booleans that say which are kept; None of any other tensor.
    """
    shape, kept = shape_of(hot), None
    if not are_lengths(shape, shape):
        return None
    while name_of(hot) in ("view", "reshape", "contiguous", "mul") and hot.args:
        made = shape_of(hot)
        if name_of(hot) == "mul":
            if len(hot.args) != 2 or not all(isinstance(each, fx.Node) for each in hot.args):
                return None
            pairs = (hot.args, hot.args[::-1])
            kept, hot = kept or hot, next((one for one, other in pairs if _is_zero_or_one(other)), None)
            if not are_lengths(shape_of(hot), made):
                return None
        else:
            hot = hot.args[0]
        if not are_lengths(shape_of(hot)[-1:], shape[-1:]):
            return None
    return Choices(hot.args[0], tuple(shape[:-1]), kept) if name_of(hot) == "one_hot" and hot.args else None


def _is_zero_or_one(factor: Any) -> bool:
    while isinstance(factor, fx.Node) and name_of(factor) in _AS_INTEGERS and factor.args:
        factor = factor.args[0]
    value = tensor_of(factor)
    return value is not None and value.dtype is torch.bool


def number_of_experts(choices: Choices) -> int:
    """Among how many is chosen, where the choices of a token are distinct numbers from 0 on; 0 where nobody knows."""
    node: Any = choices.chosen
    while name_of(node) in _VIEWS and node.args:
        node = node.args[0]
    if name_of(node) == "argmax":  # one choice of each token, so that several in a row are of as many tokens
        return _last_size(node) if choices.shape[1:] in ((), (1,)) else 0
    if node.target is not operator.getitem or node.args[1] != 1 or name_of(node.args[0]) != "topk":
        return 0
    if len(choices.shape) > 1 and choices.shape[-1:] != shape_of(node)[-1:]:
        return 0
    return _last_size(node.args[0])


def _last_size(node: fx.Node) -> int:
    """The length of the last dim of what is chosen from, if it is chosen along it; 0 otherwise."""
    scores: Any = node.args[0]
    at = 2 if name_of(node) == "topk" else 1
    dim = node.args[at] if len(node.args) > at else node.kwargs.get("dim", -1 if at == 2 else None)
    dims = len(shape_of(scores))
    return int(shape_of(scores)[-1]) if dim is not None and dims and dim in (-1, dims - 1) else 0


def choices_found(found: fx.Node) -> Choices | None:
    """The choices whose experts' numbers a node gives, each once: ``chosen.unique()``, ``(counts > 0).nonzero()``."""
    if len(found.args) != 1 or found.kwargs not in ({}, {"as_tuple": False}):
        return None
    given: Any = found.args[0]
    if name_of(found) == "unique":
        return _as_they_are(given)
    while (name_of(given), *given.args[1:]) in _NOT_ZERO and not given.kwargs:
        given = given.args[0]
    return counted(given) if name_of(found) == "nonzero" else None


def counted(counts: Any) -> Choices | None:
    """The choices of which a tensor says for each expert how many there are: ``torch.bincount(chosen)``, and sums over
    all other dims of ``F.one_hot(chosen)``.
    """
    if name_of(counts) == "bincount" and len(counts.args) == 1 and not counts.kwargs.keys() - {"minlength"}:
        return _as_they_are(counts.args[0])
    if name_of(counts) != "sum" or len(counts.args) > 2 or counts.kwargs.keys() - {"dim"}:
        return None
    hot, dims = counts.args[0], counts.args[1] if len(counts.args) > 1 else counts.kwargs.get("dim", ())
    order, hot = reordered(hot)
    left = set(order) - {order[dim] for dim in (dims if isinstance(dims, tuple | list) else [dims])}
    return choices_told(hot) if left == {len(order) - 1} else None


def _as_they_are(chosen: Any) -> Choices:
    return Choices(chosen, tuple(shape_of(chosen)))


def is_view(node: Any, of: fx.Node) -> bool:
    """Whether a node gives all that another one gives, in whatever shape."""
    while name_of(node) in ("flatten", "view", "reshape", "long") and node is not of:
        node = node.args[0]
    return node is of


def reordered(node: Any) -> tuple[list[int], Any]:
    """The tensor whose dims a node has in another order, and that order; the node itself where it is none such."""
    count = len(shape_of(node))
    order = list(range(count))
    if is_transposed(node):
        return [1, 0], node.args[0]
    if name_of(node) not in ("permute", "transpose") or not node.args:
        return order, node
    given: Any = node.args[1] if len(node.args) == 2 else node.args[1:]
    if name_of(node) == "permute":
        return [dim % count for dim in given], node.args[0]
    a, b = (dim % count for dim in given)
    order[a], order[b] = order[b], order[a]
    return order, node.args[0]


def is_transposed(node: Any) -> bool:
    """Whether a node gives a matrix with its dims the other way round."""
    is_t = name_of(node) == "t" or (isinstance(node, fx.Node) and node.target is getattr and node.args[1] == "T")
    return is_t and len(shape_of(node.args[0])) == 2
