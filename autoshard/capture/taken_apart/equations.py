"""The equations of ``torch.einsum`` that name every dim of a tensor once."""

from __future__ import annotations

from string import ascii_letters
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.backends import opt_einsum

from ..examples import new_call, shape_of, tensor_of

_DOTS = "..."


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
    """What a call of ``torch.einsum`` computes, with letters for the dims that dots stand for, and with the result that
    torch takes where none is named; None of anything else, and of equations with a label twice in one tensor.
    """
    if node.target is not torch.functional.einsum or node.kwargs or not isinstance(node.args[0], str):
        return None
    text, given = node.args[0].replace(" ", ""), node.args[1:]
    tensors = [x for x in given if isinstance(x, fx.Node) and tensor_of(x) is not None]
    named, made = _in_letters(text, [len(shape_of(x)) for x in tensors])
    if len(tensors) != len(given) or len(named) != len(given) or not all(map(_is_plain, (*named, made))):
        return None
    terms = tuple(map(Term, named, tensors))
    fit = all(len(term.labels) == len(shape_of(term.tensor)) for term in terms)
    return Equation(terms, made) if fit and set(made) <= set("".join(named)) else None


def _in_letters(text: str, ranks: list[int]) -> tuple[list[str], str]:
    """The labels of each tensor and of the result, of an equation of tensors with so many dims: dots are letters that
    it has not, aligned from the last one on, and without an arrow dots are in front of all labels that it has once.
    """
    read, arrow, made = text.partition("->")
    once = sorted(label for label in read if label.isalpha() and read.count(label) == 1)
    named, made = read.split(","), made if arrow else "".join((_DOTS, *once))
    dots = [rank - len(labels.replace(_DOTS, "")) if _DOTS in labels else 0 for labels, rank in zip(named, ranks)]
    most = max((0, *dots))
    letters = "".join(letter for letter in ascii_letters if letter not in text)[:most]
    in_letters = [labels.replace(_DOTS, letters[most - count :]) for labels, count in zip(named, dots)]
    return in_letters, made.replace(_DOTS, letters)


def take_in_pairs(node: fx.Node) -> bool:
    """Rewrites a call of ``torch.einsum`` with three tensors or more as calls with two, in the order in which torch
    multiplies them; False of any other.

    ``einsum("hde,hnd,hn->hne", x, y, z)`` becomes ``einsum("hne,hn->hne", einsum("hde,hnd->hne", x, y), z)``, in which
    products of matrices are seen.
    """
    equation = equation_of(node)
    path = [] if equation is None or len(equation.terms) < 3 else _path(equation)
    if equation is None or not path or any(len(pair) != 2 for pair in path):
        return False
    terms = list(equation.terms)
    with node.graph.inserting_before(node):
        for pair in path[:-1]:
            taken, rest = [terms[k] for k in pair], [term for k, term in enumerate(terms) if k not in pair]
            needed = "".join((equation.made, *(term.labels for term in rest)))
            made = "".join(label for label in dict.fromkeys(needed) if any(label in term.labels for term in taken))
            product = Equation(tuple(taken), made)
            x = new_call(node, torch.functional.einsum, product.text, *(term.tensor for term in taken))
            terms = [*rest, Term(made, x)]
    last = Equation(tuple(terms[k] for k in path[-1]), equation.made)
    node.args = (last.text, *(term.tensor for term in last.terms))
    return True


def sum_in_order(node: fx.Node) -> bool:
    """Has a call of ``torch.einsum`` sum over labels in the order in which they are first named, where torch would take
    them by the alphabet; False of any other.

    ``einsum("bthd,hdm->btm", x, weight)`` becomes ``einsum("btdh,dhm->btm", x, weight)``: torch multiplies matrices of
    heads and their features, of which a block is some heads, where it would have of features and their heads.
    """
    equation = equation_of(node)
    if equation is None or len(equation.terms) != 2:
        return False
    named = dict.fromkeys("".join(term.labels for term in equation.terms))
    summed = [label for label in named if label not in equation.made]
    if summed == sorted(summed):
        return False
    anew = str.maketrans("".join(summed), "".join(sorted(summed)))
    node.args = (equation.text.translate(anew), *(term.tensor for term in equation.terms))
    return True


def _path(equation: Equation) -> list[tuple[int, ...]]:
    """Which tensors are multiplied, by their places: two make another one, which stands behind the rest. As torch does,
    this asks ``opt_einsum`` where it is installed; else it goes from left to right.
    """
    count = len(equation.terms)
    if opt_einsum.is_available() and opt_einsum.enabled:
        shapes = (tuple(shape_of(term.tensor)) for term in equation.terms)
        known: Any = opt_einsum.get_opt_einsum()
        found = known.contract_path(equation.text, *shapes, shapes=True, optimize=opt_einsum.strategy)
        return [tuple(pair) for pair in found[0]]
    return [(0, 1), *((left - 1, 0) for left in range(count - 1, 1, -1))]


def _is_plain(labels: str) -> bool:
    return (labels.isalpha() or not labels) and len(set(labels)) == len(labels)
