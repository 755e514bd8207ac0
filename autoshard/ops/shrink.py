"""Small forms of an operator, so that its rules can be checked in microseconds whatever its size.

A small form means what the operator means. The lengths of dims and the integers among the arguments are replaced by one
map that keeps their order: ``tril(x, -1024)`` of a tensor (16, 8192, 8192) becomes ``tril(x, -3)`` of a tensor (4, 6,
6), a band in a square again. The map also keeps how a dim is cut: a small length is divisible by the ranks of the check
where the real one is by the ranks of the axis. Lengths up to 2 stay, and so do integers up to 2, which may be modes.

Where integers relate to lengths in another way, the operator is shrunk by what is known of it: images stay as large as
they are, pieces of splits and ranges of slices follow their dim, and a view keeps its common factors. Floating tensors
become float64, complex ones complex128.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..capture import Node, TensorMeta
from .lengths import SMALLEST, small_lengths, wide
from .operator import Form, Metas, known

# Integers of these names say which dims an operator acts on, not how far.
_DIM_NAME = re.compile(r"(\w*_)?(dim|dims|axis)\d?")


def carries_lengths(node: Node) -> bool:
    """Whether integers among the arguments bear on lengths in a way that is not known here."""
    return known(node.op).small_form is not None or bool(_carried(node))


def small(node: Node, inputs: Metas, parts: int, ranks: int) -> Form | None:
    """The same operator on small tensors; None where no small form is known.

    Args:
        parts: the number of ranks of the axis the rule is meant for; decides which lengths count as divisible.
        ranks: the number of ranks of the small check; small lengths are divisible by it where the large ones are by
            ``parts``.

    Returns:
        The node with its length arguments replaced (its ``outputs`` are still the large ones) and the small inputs.
    """
    entry = known(node.op)
    if entry.small_form is not None:
        return entry.small_form(node, inputs, parts, ranks)
    keeps = entry.keeps or _keeps_none
    values = {size for meta in (*inputs, *(m for m in node.outputs if m)) for size in meta.shape}
    length = small_lengths(values, _carried(node), parts, ranks)
    shapes = [
        [size if keeps(node, k, d, len(meta.shape)) else length[size] for d, size in enumerate(meta.shape)]
        for k, meta in enumerate(inputs)
    ]
    if entry.small is not None:
        args, kwargs = entry.small(node, inputs, shapes, length), node.kwargs
    else:
        args, kwargs = _map_lengths(node, length.__getitem__)
    metas = tuple(TensorMeta(tuple(shape), wide(meta.dtype)) for shape, meta in zip(shapes, inputs))
    return replace(node, args=_widen(args), kwargs=_widen(kwargs)), metas


def widened(node: Node, inputs: Metas) -> Form:
    """The operator at its real size, in double precision."""
    metas = tuple(TensorMeta(meta.shape, wide(meta.dtype)) for meta in inputs)
    return replace(node, args=_widen(node.args), kwargs=_widen(node.kwargs)), metas


def _keeps_none(node: Node, position: int, dim: int, rank: int) -> bool:
    return False


def _carried(node: Node) -> set[int]:
    found: set[int] = set()

    def note(value: int) -> int:
        found.add(value)
        return value

    if known(node.op).small is None:
        _map_lengths(node, note)
    return found


def _map_lengths(node: Node, change: Callable[[int], int]) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """Arguments with every integer above 2 that may carry a length replaced; signs are kept."""
    assert node.op is not None
    declared = node.op._schema.arguments
    named = {argument.name: argument for argument in declared}

    def mapped(value: Any, argument: Any) -> Any:
        if _DIM_NAME.fullmatch(argument.name) or "int" not in str(argument.type):
            return value
        if isinstance(value, tuple):
            return tuple(mapped(item, argument) for item in value)
        if type(value) is not int or abs(value) <= SMALLEST:
            return value
        return change(value) if value > 0 else -change(-value)

    args = tuple(mapped(value, argument) for value, argument in zip(node.args, declared))
    return args, tuple((key, mapped(value, named[key])) for key, value in node.kwargs)


def _widen(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(_widen(item) for item in value)
    return wide(value) if isinstance(value, torch.dtype) else value
