"""One line on stderr that says what is going on: rewritten where a person watches, once a minute in a pipe.

``solving: 2.34 ms, at least 2.31 ms, gap 1.3% (0:42)``; the time is that since the start. What ends within half a
second (a minute in a pipe) says nothing.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

FIRST_S, REDRAWN_S, PIPE_S = 0.5, 0.25, 60.0
"""When a line is shown first and how often it is drawn on a terminal; how often it is written in a pipe."""
CLEAR = "\r\x1b[K"
"""What takes the line away, on a terminal."""


@contextmanager
def progress_line(stage: str, stream: TextIO | None = None, pipe_s: float = PIPE_S) -> Iterator[Callable[[str], None]]:
    """Shows what is going on inside, which the function given changes, from any thread.

    Args:
        stage: what is going on at first.
        stream: stderr by default.
        pipe_s: how often a line is written where no person watches.
    """
    line = _Line(stage, stream or sys.stderr, pipe_s)
    thread = threading.Thread(target=line.run, name="autoshard progress", daemon=True)
    thread.start()
    try:
        yield line.say
    finally:
        line.ended.set()
        thread.join()


class _Line:
    def __init__(self, stage: str, stream: TextIO, pipe_s: float) -> None:
        self._stage, self._stream, self._pipe_s = stage, stream, pipe_s
        self._started_s = time.monotonic()
        self.ended = threading.Event()

    def say(self, stage: str) -> None:
        self._stage = stage

    def run(self) -> None:
        is_watched = self._stream.isatty()
        pause_s = FIRST_S if is_watched else self._pipe_s
        is_drawn = False
        try:
            while not self.ended.wait(pause_s):
                minutes, seconds = divmod(int(time.monotonic() - self._started_s), 60)
                text = f"{self._stage} ({minutes}:{seconds:02})"
                if is_watched:
                    text, pause_s = CLEAR + text[: shutil.get_terminal_size().columns - 1], REDRAWN_S
                self._stream.write(text if is_watched else f"autoshard: {text}\n")
                self._stream.flush()
                is_drawn = is_watched
            if is_drawn:
                self._stream.write(CLEAR)
                self._stream.flush()
        except (OSError, ValueError):  # stderr has gone: nobody is there to be told
            return
