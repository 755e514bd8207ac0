"""Every golden text is what the code writes today; ``python -m tests.plans.write_golden`` writes them anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from .write_golden import FOLDER, GOLDEN, ROOT
from .write_llama import PLANS

GIVEN = {FOLDER / name for name in (*(f"transformer.format-{version}.yaml" for version in (1, 2, 3, 4, 5, 6)), *PLANS)}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_golden_text_is_what_is_written(path: Path) -> None:
    assert GOLDEN[path]() == path.read_text(), "if the difference is right: python -m tests.plans.write_golden"


def test_no_golden_file_is_left_unchecked() -> None:
    assert set(FOLDER.iterdir()) == {path for path in GOLDEN if path.parent == FOLDER} | GIVEN
