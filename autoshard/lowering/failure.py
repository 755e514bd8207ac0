"""A rank that fails in a step says so before it ends; ranks whose collectives then break off say who failed, and why.

Without it every rank but the one that failed ends with gloo's ``Connection closed by peer``.
"""

from __future__ import annotations

import linecache
import sys
import time
from collections.abc import Callable, Iterator
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
    def telling(self, doing: str, anew: bool = True) -> Iterator[None]:
        """Tells the other ranks of an exception inside, or finds out why they broke off.

        Args:
            doing: what this rank does, as errors say it: ``the forward``.
            anew: whether this rank runs on, so that what it told of before is over; not where it may end of that.

        Raises:
            JobError: a collective broke off; the message names the rank that failed and its reason, or says that no
                rank could say why, and in which collective this rank stood.
            Exception: any other that was raised inside.
        """
        if anew:
            self._take_back()
        try:
            yield
        except (JobError, ENOUGH_SAVED):
            raise
        except BaseException as error:
            stood = standing(error)
            if stood is None:
                said = f"rank {self._board.rank} failed in {doing}: {failure_text(error)}"
                self._tell(said)
                if any(is_repeated(said, first) for first in self._before()):
                    print_in_one_line(error, said)
                raise
            if not within(STORE_S, self._told_so_far, None):
                # torchrun ends this process a tenth of a second after the other one: before anybody has answered
                line = f"rank {self._board.rank} lost another rank in {stood} in {doing}; asking why"
                print(f"autoshard: {line}", file=sys.stderr, flush=True)
            broken = JobError(self._explained(doing, stood, error))
            print_in_one_line(broken, f"rank {self._board.rank} ends: {broken}")
            raise broken from error

    def _tell(self, text: str) -> None:
        self._told = within(STORE_S, lambda: self._leave(text), None)

    def _leave(self, text: str) -> str:
        key = f"{_FAILURES}/{self._board.count(_FAILURES)}"
        self._board.put(key, text)
        return key

    def _before(self) -> list[str]:
        """What other ranks told of before this one did."""
        if self._told is None:
            return []
        mine = int(self._told.rpartition("/")[2])
        return within(STORE_S, lambda: self._told_by(range(1, mine)), [])

    def _told_by(self, numbers: range) -> list[str]:
        return [text for k in numbers if (text := self._board.get(f"{_FAILURES}/{k}"))]

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

    def _told_so_far(self) -> list[str]:
        return self._told_by(range(1, self._board.count(_FAILURES, 0) + 1))

    def _reasons(self) -> list[str]:
        """What ranks said, the first to fail first."""
        deadline_s = time.monotonic() + ASKED_S
        while True:
            texts = self._told_so_far()
            if texts or time.monotonic() > deadline_s:
                return texts
            time.sleep(0.05)


def is_repeated(said: str, first: str) -> bool:
    """Whether ``rank 3 failed in the forward: InputError: ...`` is of the kind that another rank met in the same place;
    its numbers may be those of other shards.
    """
    kinds = [text.partition(" failed ")[2].split(": ")[:2] for text in (said, first)]
    return said != first and kinds[0] == kinds[1]


_IN_ONE_LINE = "_autoshard_in_one_line"


def print_in_one_line(error: BaseException, line: str) -> None:
    """Makes an exception that nothing catches end the process with a line in place of its traceback: another rank of
    the job prints that.
    """
    setattr(error, _IN_ONE_LINE, line)
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """What Python calls for an exception that nothing caught; all but those in one line are left to what was there."""

    def __init__(self, before: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = getattr(error, _IN_ONE_LINE, None)
        if line is None:
            self._before(kind, error, trace)
        else:
            print(f"autoshard: {_cut(line)}", file=sys.stderr)


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
    return _cut(str(error))


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARS else line[:MOST_CHARS] + "..."
