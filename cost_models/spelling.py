"""Hints for misspelt words: the one place that says *did you mean*."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

ALIKE = 0.6
"""How alike two words must be to be taken for one, from 0 (anything) to 1 (equal); difflib's own default."""


def closest(word: str, known: Iterable[str], alike: float = ALIKE) -> str | None:
    """The known word that is most like ``word``, or None where none is as much ``alike``.

    >>> closest("alreduce", ("all_gather", "all_reduce"))
    'all_reduce'
    """
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=alike)), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """How an error about an unknown word ends: ``; did you mean 'all_reduce'?``, or nothing where no word is close."""
    found = closest(word, known)
    return "" if found is None else f"; did you mean {found!r}?"
