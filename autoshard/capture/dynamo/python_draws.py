"""Numbers that Python draws, in [0, 1): what of them is known whatever is drawn."""

from __future__ import annotations

import random
from typing import Any

_TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_OPPOSITE = {">=": "<", ">": "<=", "!=": "=="}


def is_from_zero_to_one(function: object, given: tuple[Any, ...]) -> bool:
    """Whether a call of a function draws such a number: ``random.random()``, ``random.uniform(0, 1)``."""
    return (function == random.random and given == ()) or (function == random.uniform and given == (0, 1))


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
