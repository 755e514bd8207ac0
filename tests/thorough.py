"""Which cases of a test are looked at in ``make test-all`` alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def some_thorough(cases: Iterable[Any], thorough: Collection[Any]) -> list[Any]:
    """The cases, each as an argument of ``parametrize``; those in ``thorough`` are thorough ones."""
    return [pytest.param(case, marks=pytest.mark.thorough if case in thorough else ()) for case in cases]
