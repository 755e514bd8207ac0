"""The line of progress: live on a terminal, now and then in a pipe, and nothing of what is short."""

from __future__ import annotations

import io
import os
import pty
import threading

from autoshard.progress import CLEAR, progress_line


class _Pipe(io.StringIO):
    """A pipe that says when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def flush(self) -> None:
        self.written.set()


def test_what_is_short_says_nothing() -> None:
    pipe = _Pipe()
    with progress_line("capturing", pipe) as say:
        say("solving")
    assert pipe.getvalue() == ""


def test_a_pipe_gets_whole_lines_with_the_latest_stage_and_the_time() -> None:
    pipe = _Pipe()
    with progress_line("capturing", pipe, pipe_s=0.05) as say:
        say("solving: 2.34 ms, gap 1.30%")
        assert pipe.written.wait(30)
    lines = pipe.getvalue().splitlines()
    assert lines and all(line.startswith("autoshard: solving: 2.34 ms, gap 1.30% (0:") for line in lines)


def test_a_terminal_gets_one_line_that_is_gone_at_the_end() -> None:
    leader, follower = pty.openpty()
    with open(follower, "w") as terminal:
        with progress_line("capturing", terminal):
            shown = os.read(leader, 100).decode()
        assert shown.startswith(CLEAR + "capturing (0:0")
        rest = os.read(leader, 1000).decode()
    os.close(leader)
    assert rest.endswith(CLEAR) and "\n" not in shown + rest
