"""What operators are called that the backward computes again: ``layers.0/silu`` is ``layers.0/again.silu`` there."""

from __future__ import annotations

AGAIN = "again."
"""Before the role of an operator that computes something again."""


def again_name(name: str) -> str:
    """The name of the operator that computes another one again."""
    path, _, role = name.rpartition("/")
    return f"{path}/{AGAIN}{role}"


def first_name(name: str) -> str | None:
    """The name of the operator that this one computes again; None for one that does not."""
    if AGAIN not in name:  # nearly all
        return None
    path, _, role = name.rpartition("/")
    return f"{path}/{role.removeprefix(AGAIN)}" if role.startswith(AGAIN) else None
