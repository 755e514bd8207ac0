"""Models are captured once for all tests of a process: a capture takes 15 times as long as reading the graph it gave.

What is read is what :mod:`autoshard.capture.kept_graph` wrote, under the product's own key, as if its cache of graphs
were on. Tests of captures, which compare the two, capture anew each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from autoshard.capture import CapturedGraph

_CAPTURE = import_module("autoshard.capture.capture")  # the package has a function of that name


class _InMemory(dict[str, bytes]):
    """Graphs of this process."""

    put = dict.__setitem__


_GRAPHS = _InMemory()


@contextmanager
def kept_graphs() -> Iterator[None]:
    """Inside, graphs are kept, and those that were kept are read, unless a test says where they are to be kept."""
    captured = _CAPTURE._captured

    def read_or_captured(*given: Any) -> CapturedGraph:
        model, args, kwargs, _, precision, graphs = given
        found: CapturedGraph = captured(model, args, kwargs, True, precision, _GRAPHS if graphs is None else graphs)
        return found

    with patch.object(_CAPTURE, "_captured", read_or_captured):
        yield
