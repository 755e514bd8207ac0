"""The equations of ``torch.einsum`` that name every dim of every tensor once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx


class Term(NamedTuple):
    """A tensor with a label for each of its dims."""

    labels: str
    tensor: fx.Node


class Equation(NamedTuple):
    """The tensors that are multiplied, and the labels of the result."""

    terms: tuple[Term, ...]
    made: str

    @property
    def text(self) -> str:
        """As torch takes it."""
        return f"{','.join(term.labels for term in self.terms)}->{self.made}"


def equation_of(node: fx.Node) -> Equation | None:
    """What a call of ``torch.einsum`` computes; None of anything else, and of equations with dots, without a result, or
    with a label twice in one tensor.
    """
    if node.target is not torch.functional.einsum or node.kwargs or not isinstance(node.args[0], str):
        return None
    read, arrow, made = node.args[0].replace(" ", "").partition("->")
    named, tensors = read.split(","), node.args[1:]
    if not arrow or len(named) != len(tensors) or not all(map(_is_plain, (*named, made))):
        return None
    given = [x for x in tensors if isinstance(x, fx.Node)]
    terms = tuple(map(Term, named, given))
    return Equation(terms, made) if len(terms) == len(tensors) and set(made) <= set("".join(named)) else None


def _is_plain(labels: str) -> bool:
    return labels.isalpha() and len(set(labels)) == len(labels)
