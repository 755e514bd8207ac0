"""The examples in the docstrings of the three packages hold."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def modules_with_examples() -> list[str]:
    """Every module of ours whose source has a ``>>>``."""
    files = (path for package in ("autoshard", "solver", "cost_models") for path in (ROOT / package).rglob("*.py"))
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in files if ">>> " in path.read_text()]
    return sorted(".".join(names[:-1] if names[-1] == "__init__" else names) for names in parts)


@pytest.mark.parametrize("module", modules_with_examples())
def test_the_examples_of_a_docstring_hold(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module))
    assert found.attempted
    assert found.failed == 0
