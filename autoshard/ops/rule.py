"""One-axis rules: the placements with which one operator can run along one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from ..layout import Placement, R


@dataclass(frozen=True)
class Rule:
    """Placements along one mesh axis: what is wanted of each tensor input, and what each result then is.

    ``inputs`` has one entry per tensor argument in argument order, ``outputs`` one per result (None for an absent one).
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement | None, ...]


def replicate_rule(input_count: int, outputs: tuple[object | None, ...]) -> Rule:
    """Every rank runs the whole operator. Always true of an operator without randomness."""
    return Rule((R,) * input_count, tuple(None if meta is None else R for meta in outputs))
