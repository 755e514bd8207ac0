"""Numbers that Python and numpy draw, those in [0, 1): what of them is known whatever is drawn."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import Any

_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_OPPOSITE = {">=": "<", ">": "<=", "!=": "=="}

_OF_NUMPY = dict.fromkeys(("random", "random_sample", "sample", "rand", "randn"), 0)
_OF_NUMPY |= dict.fromkeys(("uniform", "normal", "randint"), 2)
"""How many arguments functions of ``numpy.random`` take before sizes, without which they draw one number."""


def is_from_zero_to_one(function: object, given: tuple[Any, ...]) -> bool:
    """Whether a call of a function draws such a number: ``random.random()``, ``random.uniform(0, 1)``."""
    return (function == random.random and given == ()) or (function == random.uniform and given == (0, 1))


def numpy_draws_one(name: str, given: tuple[Any, ...], names: Collection[str]) -> bool:
    """Whether a call of a function of ``numpy.random``, with arguments by these names, draws one number.

    Args:
        given: None for an argument that is no number.
    """
    most = _OF_NUMPY.get(name, -1)
    return len(given) <= most and "size" not in names and all(isinstance(one, (int, float)) for one in given)


def numpy_draws_from_zero_to_one(name: str, given: tuple[Any, ...]) -> bool:
    """Whether a call of a function of ``numpy.random`` that draws one number draws it from zero to one."""
    return given == (0, 1) if name == "uniform" and given else given == () and name not in ("randn", "normal")


def compared(relation: str, number: object, *, is_turned: bool = False) -> bool | None:
    """What ``drawn < number`` is, or another relation; None where that depends on what is drawn.

    Args:
        is_turned: the number stands in front, ``number < drawn``.
    """
    if not isinstance(number, (int, float)) or number != number or relation not in _TURNED:
        return None
    relation = _TURNED[relation] if is_turned else relation
    if relation in _OPPOSITE:
        known = compared(_OPPOSITE[relation], number)
        return None if known is None else not known
    if number >= 1:
        return relation != "=="
    return False if number < 0 or (number == 0 and relation == "<") else None
