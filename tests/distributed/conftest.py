"""What the tests of this folder share: captures, and the rules of operators."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .turns import share


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for all tests of a run, in whichever process of pytest they are."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kept"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(autouse=True)
def _shared(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    share(kept, monkeypatch)
