"""A rank that fails in a step says so before it ends; ranks whose collectives then break off say who failed, and why.

Without it every rank but the one that failed ends with gloo's ``Connection closed by peer``.
"""

from __future__ import annotations

import linecache
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from torch import fx

from ..errors import JobError
from .adapter import ENOUGH_SAVED, collective_name, is_connection_error
from .board import Board, within

STORE_S = 5.0
"""How long telling the others, or asking them, may take: the store may be gone."""
ASKED_S = 1.0
"""How long to wait for a reason: the rank that failed wrote it before it ended."""
MOST_CHARS = 2000

_FAILURES = "failures"


class Failures:
    """What the ranks of one module tell each other of failures."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._told: str | None = None

    @contextmanager
    def telling(self, doing: str) -> Iterator[None]:
        """Tells the other ranks of an exception inside, or finds out why they broke off.

        Args:
            doing: what this rank does, as errors say it: ``the forward``.

        Raises:
            JobError: a collective broke off; the message names the rank that failed and its reason, or says that no
                rank could say why, and in which collective this rank stood.
            Exception: any other that was raised inside.
        """
        self._take_back()
        try:
            yield
        except (JobError, ENOUGH_SAVED):
            raise
        except BaseException as error:
            stood = standing(error)
            if stood is None:
                self._tell(f"rank {self._board.rank} failed in {doing}: {failure_text(error)}")
                raise
            raise JobError(self._explained(doing, stood, error)) from error

    def _tell(self, text: str) -> None:
        self._told = within(STORE_S, lambda: self._leave(text), None)

    def _leave(self, text: str) -> str:
        key = f"{_FAILURES}/{self._board.count(_FAILURES)}"
        self._board.put(key, text)
        return key

    def _take_back(self) -> None:
        """This rank runs on, so what it told of before is not why anything breaks off later."""
        if self._told is not None:
            key, self._told = self._told, None
            within(STORE_S, lambda: self._board.put(key, ""), None)

    def _explained(self, doing: str, stood: str, error: BaseException) -> str:
        here = f"this rank ({self._board.rank}) stood in {stood} in {doing}"
        reasons = within(STORE_S, self._reasons, None)
        if reasons:
            return f"{'; '.join(reasons)}; {here}"
        why = "no rank could say why" if reasons is not None else "the job's store is gone with it, so none can say why"
        return f"another rank has ended, hangs or was killed; {why}; {here}: {_short(error)}"

    def _reasons(self) -> list[str]:
        """What ranks said, the first to fail first."""
        deadline_s = time.monotonic() + ASKED_S
        while True:
            told = range(1, self._board.count(_FAILURES, 0) + 1)
            texts = [text for k in told if (text := self._board.get(f"{_FAILURES}/{k}"))]
            if texts or time.monotonic() > deadline_s:
                return texts
            time.sleep(0.05)


def standing(error: BaseException) -> str | None:
    """The collective in which an exception was raised, in words; None where it is no failure of a collective."""
    for frame, line in _frames(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, fx.GraphModule):
            name = linecache.getline(frame.f_code.co_filename, line).partition("=")[0].strip()
            node = next((node for node in module.graph.nodes if node.name == name), None)
            if node is not None and collective_name(node) is not None:
                label = node.meta["label"]
                moved = f"of {label.tensor} " if label.tensor else ""
                return f"the {collective_name(node)} {moved}for {label.operator}"
    return "a collective" if is_connection_error(error) else None


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def failure_text(error: BaseException) -> str:
    """An exception as other ranks quote it: its class and its message."""
    return f"{type(error).__name__}: {_short(error)}".rstrip(": ")


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= MOST_CHARS else text[:MOST_CHARS] + "..."
