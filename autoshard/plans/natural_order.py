"""The canonical order of names: numbers count as numbers, so ``layers.2`` comes before ``layers.10``."""

from __future__ import annotations

import re
from functools import lru_cache

_NUMBER = re.compile(r"([0-9]+)")

MOST_KEPT = 1 << 16
"""Names whose keys are kept: plans of a model sort the same ones again and again."""

NaturalKey = tuple[tuple[tuple[int, str], ...], str]


@lru_cache(MOST_KEPT)
def natural_key(name: str) -> NaturalKey:
    """The sort key of a name; two names have the same key only if they are equal.

    >>> sorted(["layers.10.w", "layers.2.w", "embed.w"], key=natural_key)
    ['embed.w', 'layers.2.w', 'layers.10.w']
    """
    parts = _NUMBER.split(name)  # text, digits, text, digits, ..., text
    digits = [part.lstrip("0") if i % 2 else part for i, part in enumerate(parts)]
    return tuple((len(part) if i % 2 else 0, part) for i, part in enumerate(digits)), name


def starred(name: str) -> str:
    """The name with ``*`` for the numbers of layers: ``layers.3.norm/mul.1`` becomes ``layers.*.norm/mul.1``."""
    path, slash, role = name.partition("/")
    return ".".join("*" if part.isdecimal() else part for part in path.split(".")) + slash + role
