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


class Sides(NamedTuple):
    """The labels of a product of matrices: of dims in front that both have, of the rows of the first, of what is summed
    over, and of the columns of the second.
    """

    front: str
    rows: str
    summed: str
    columns: str


def sides_of(of_x: str, of_y: str, made: str) -> Sides | None:
    """How tensors with these labels are multiplied as matrices; None where a dim of one of them alone is summed over,
    or nothing is.
    """
    found = Sides(
        "".join(label for label in made if label in of_x and label in of_y),
        "".join(label for label in of_x if label in made and label not in of_y),
        "".join(label for label in of_x if label in of_y and label not in made),
        "".join(label for label in of_y if label in made and label not in of_x),
    )
    front, rows, summed, columns = found
    is_product = summed and {*of_x} == {*front, *rows, *summed} and {*of_y} == {*front, *summed, *columns}
    return found if is_product else None


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
