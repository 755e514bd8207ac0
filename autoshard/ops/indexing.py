"""Operators that read or write where an index says, cut three ways: along what is not indexed, along the index, and as
addends.

A rank that has some places of an index and the values for them adds these into a tensor of its own; what the ranks have
then adds up, where what they add to adds up, too. That is how messages along the edges of a graph are summed up, and
the gradient of what was indexed: both start from zeros, which every rank has as an addend.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..capture import Node, Ref
from ..layout import P_SUM, Placement, R, S
from .operator import Metas, Operator, Shape, enter
from .rule import Rule


class _Places:
    """How the dims of a tensor, of the tensors that index it, and of what is there belong together.

    ``x[:, i, j]`` of (A, B, C, D) with i (E, 1) and j (F) is (A, E, F, D): the dims of i and j together stand where the
    indexed ones stood, or in front if those are not side by side.
    """

    def __init__(self, node: Node, whole: Shape, indices: Metas) -> None:
        given = [isinstance(index, Ref) for index in node.args[1]]
        given += [False] * (len(whole) - len(given))
        at = [d for d, indexed in enumerate(given) if indexed]
        self.indices = indices
        self.length = max((len(meta.shape) for meta in indices), default=0)
        self.first = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
        self.kept = [d for d, indexed in enumerate(given) if not indexed]

    def kept_dims(self) -> Iterator[tuple[int, int]]:
        """The dims that no tensor indexes, and where each is in what is there."""
        for k, d in enumerate(self.kept):
            yield d, k if k < self.first else k + self.length

    def index_dims(self) -> Iterator[tuple[int, tuple[Placement, ...]]]:
        """The dims of the indices in what is there, and the placements of the indices where it is cut along one."""
        for k in range(self.length):
            places = [k - self.length + len(meta.shape) for meta in self.indices]
            cut = [S(d) if d >= 0 and meta.shape[d] > 1 else R for d, meta in zip(places, self.indices)]
            if any(placement != R for placement in cut):
                yield self.first + k, tuple(cut)


def _reading(node: Node, inputs: Metas) -> list[Rule]:
    places = _Places(node, inputs[0].shape, inputs[1:])
    whole = (R,) * (len(inputs) - 1)
    return [
        Rule((P_SUM, *whole), (P_SUM,)),
        *(Rule((S(d), *whole), (S(there),)) for d, there in places.kept_dims()),
        *(Rule((R, *cut), (S(there),)) for there, cut in places.index_dims()),
    ]


def _writing(node: Node, inputs: Metas) -> list[Rule]:
    """Values that are one number along a dim are whole there. Of what overwrites, ranks that have other places do not
    know of each other.
    """
    target, *indices, values = inputs
    places = _Places(node, target.shape, tuple(indices))
    whole = (R,) * len(indices)
    rank = len(places.kept) + places.length

    def of_values(dim: int) -> Placement:
        d = dim - rank + len(values.shape)
        return S(d) if d >= 0 and values.shape[d] > 1 else R

    rules = [Rule((S(d), *whole, of_values(there)), (S(d),)) for d, there in places.kept_dims()]
    rules.append(Rule((P_SUM, *whole, P_SUM), (P_SUM,)))
    if len(node.args) > 3 and node.args[3]:
        rules += [Rule((P_SUM, *cut, of_values(there)), (P_SUM,)) for there, cut in places.index_dims()]
    return rules


def _adding(node: Node, inputs: Metas) -> list[Rule]:
    """``index_add``: the index has one dim, along which the tensor that is added is cut with it."""
    target, index, added = inputs
    rules = [Rule((P_SUM, R, P_SUM), (P_SUM,))]
    if target.shape and index.shape and added.shape:
        dim = node.args[1] % len(target.shape)
        rules += [Rule((S(d), R, S(d)), (S(d),)) for d in range(len(target.shape)) if d != dim]
        rules.append(Rule((P_SUM, S(0), S(dim)), (P_SUM,)))
    return rules


def _selecting(node: Node, inputs: Metas) -> list[Rule]:
    """``index_select``: as :func:`_reading` one index of one dim."""
    whole, index = inputs
    rules = [Rule((P_SUM, R), (P_SUM,))]
    if whole.shape and index.shape:
        dim = node.args[1] % len(whole.shape)
        rules += [Rule((S(d), R), (S(d),)) for d in range(len(whole.shape)) if d != dim]
        rules.append(Rule((R, S(0)), (S(dim),)))
    return rules


def _within(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Indices of the dims that they are of, of which one may have a single element."""
    whole, *others = values
    lengths = [size for size, index in zip(whole.shape, node.args[1]) if isinstance(index, Ref)]
    indices = [index if index.dtype is torch.bool else index % size for size, index in zip(lengths, others)]
    return (whole, *indices, *others[len(lengths) :])


def _looking_up(node: Node, inputs: Metas) -> list[Rule]:
    """``searchsorted`` in one sequence, which is whole: every value is looked for by itself."""
    sequence, *values = inputs
    if len(sequence.shape) != 1 or len(values) != 1:
        return []
    return [Rule((R, S(d)), (S(d),)) for d, size in enumerate(values[0].shape) if size > 1]


enter("index", Operator(more_rules=_reading, meant=_within, kernel="indexing"))
enter("_unsafe_index", Operator(rules=_reading, meant=_within, kernel="indexing"))
enter("index_put", Operator(more_rules=_writing, meant=_within, kernel="indexing"))
enter("_unsafe_index_put", Operator(rules=_writing, meant=_within, kernel="indexing"))
enter("index_select", Operator(more_rules=_selecting, kernel="indexing", traits=("rows",)))
enter("index_add", Operator(rules=_adding, kernel="indexing"))
enter("searchsorted", Operator(rules=_looking_up, kernel="indexing"))
