"""The one error of this package."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ProfileError(ValueError):
    """A hardware profile that cannot be found, read or trusted, or that does not fit what is asked of it."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a misspelt word: ``"; did you mean 'x'?"``, or nothing where no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
