"""What every test relies on, however the tests are started."""

from __future__ import annotations

import gc
import signal

import pytest
from hypothesis import settings

# A shell that starts a command in the background makes it ignore Ctrl-C, and the processes of the tests inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("no wall time", deadline=None)
settings.load_profile("no wall time")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests first: one that starts last keeps a process busy while the others have nothing left to do."""
    items.sort(key=lambda item: "fuzz" not in item.path.parts)


def pytest_collection_finish() -> None:
    """What is imported and collected stays; looking through it for garbage took a sixth of the time of the tests."""
    gc.collect()
    gc.freeze()
