from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cost_models import Profile, load_profile


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str | bytes], Profile]:
    def write_and_load(content: str | bytes) -> Profile:
        path = tmp_path / "profile.yaml"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return load_profile(str(path))

    return write_and_load
