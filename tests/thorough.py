"""Which cases of a test are looked at in ``make test-all`` alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_thorough(cases: Iterable[Any], thorough: Collection[Any]) -> list[Any]:
    """The cases for ``parametrize``, where a tuple is several arguments; those in ``thorough`` are thorough ones."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=[pytest.mark.thorough] * (case in thorough))
        for case in cases
    ]
