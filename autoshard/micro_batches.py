"""What stands in a plan of several micro-batches for what is held over the step, by name.

A parameter may be held for the whole step in another layout than it is stored in: ``layers.0.wq/held_weight`` is the
copy of ``layers.0.wq.weight`` that every micro-batch reads. Its gradients are added up in a layout of their own before
they are brought to that of the parameter: ``layers.0.wq/summed_weight``.
"""

from __future__ import annotations

from collections.abc import Iterable

HELD = "held_"
"""Before the name of a parameter within its module: the copy that is held over the step."""
SUMMED = "summed_"
"""The same: the sum of its gradients over the micro-batches."""


def held_name(parameter: str) -> str:
    """The name of the copy of a parameter that is held over the step."""
    path, _, name = parameter.rpartition(".")
    return f"{path}/{HELD}{name}"


def summed_name(parameter: str) -> str:
    """The name of the sum of a parameter's gradients."""
    path, _, name = parameter.rpartition(".")
    return f"{path}/{SUMMED}{name}"


def is_held(name: str) -> bool:
    """Whether an operator stands for a copy that is held over the step."""
    return name.rpartition("/")[2].startswith(HELD)


def is_summed(name: str) -> bool:
    """Whether an operator stands for a sum of gradients."""
    return name.rpartition("/")[2].startswith(SUMMED)


def operator_runs(name: str, micro_batches: int) -> int:
    """How often an operator runs in a step: once in each micro-batch. The first gradients are there as they are, and
    the others are added.
    """
    return micro_batches - 1 if micro_batches > 1 and is_summed(name) else micro_batches


def redistribution_runs(tensor: str, consumers: Iterable[str], micro_batches: int) -> int:
    """How often a redistribution runs in a step: what makes a held copy, or takes a sum of gradients away, once."""
    return 1 if micro_batches == 1 or is_summed(tensor) or any(map(is_held, consumers)) else micro_batches
