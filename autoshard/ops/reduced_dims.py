"""Operators that go over some dims of their first tensor and keep the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial

from ..capture import Node
from ..layout import Layout
from .operator import AsOne, Metas, Passes


def kept_dims(rank: int, reduced: Collection[int], keepdim: bool) -> list[tuple[int, int]]:
    """The dims that it does not go over, each with its place in the result: further to the front where the others left
    it.
    """
    kept = [d for d in range(rank) if d not in reduced]
    return [(d, d if keepdim else k) for k, d in enumerate(kept)]


def whole_along(dims: Callable[[Node], Iterable[int]]) -> AsOne:
    """Whether the dims that an operator goes over are whole, so that it is one kernel of torch."""
    return partial(_whole_along, dims)


def reads_no_rows_in_parts(as_one: AsOne) -> Passes:
    """How often the bytes of an operator move that in parts reads numbers for rows, and no row."""
    return partial(_rows_read, as_one)


def _whole_along(dims: Callable[[Node], Iterable[int]], node: Node, layouts: tuple[Layout, ...]) -> bool:
    return not any(layouts[0].axes_of(d) for d in dims(node))


def _rows_read(as_one: AsOne, node: Node, inputs: Metas, layouts: tuple[Layout, ...]) -> float:
    return 1.0 if as_one(node, layouts) else 0.0
