"""Work for several jobs side by side, in processes that are copies of this one.

They are forked, so that what the work needs (a captured graph) is there without being sent. A fork is safe only as long
as this process has run neither a solver nor large kernels: their threads would be missing in the copy. The command
``search`` has not, as all of that happens in the copies; a program that uses autoshard as a library may have.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from threading import Thread
from typing import Any, TypeAlias, TypeVar

import torch

from ..errors import AutoshardError

MOST_SAID = 400
"""Characters of a line that a process says; in UTF-8 less than what a pipe takes in one piece (PIPE_BUF)."""

Job = TypeVar("Job")
Result = TypeVar("Result")
Say: TypeAlias = Callable[[str], None]

DoAll: TypeAlias = Callable[[Sequence[Job]], Iterator[Result]]
"""Does the work for several jobs; the results are in their order."""


class WorkerError(AutoshardError):
    """A process that worked beside this one has ended."""


@contextmanager
def side_by_side(
    work: Callable[[Job, Say], Result], processes: int, report: Say = lambda said: None
) -> Iterator[DoAll[Job, Result]]:
    """What does the work for several jobs, up to so many at once; jobs and results are sent, as pickles.

    With one process, and where fork is no safe way to start one (anywhere but on Linux), all is done in this one. When
    the block ends, also by Ctrl-C, so do the processes. Their warnings are given here.

    Args:
        work: is given a job, and what it may call to say how far it is.
        report: called with what the processes say, from a thread; what several of them do is in one line.

    Raises:
        WorkerError: in the block, where one of the processes was ended from outside.
    """
    if processes == 1 or sys.platform != "linux":
        yield lambda jobs: (work(job, report) for job in jobs)
        return
    before = set(multiprocessing.active_children())
    heard, said = os.pipe()
    os.set_blocking(said, False)
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _begin, (work, said))
    hearing = Thread(target=_hear, args=(heard, report), name="autoshard side by side", daemon=True)
    hearing.start()

    def do_all(jobs: Sequence[Job]) -> Iterator[Result]:
        for result, warned in pool.map(_do, jobs):
            for message in warned:
                warnings.warn(message, stacklevel=1)
            yield result

    try:
        yield do_all
    except BrokenProcessPool:
        raise WorkerError(
            "a process that planned on some of the meshes was ended from outside, perhaps for want of memory; each "
            "takes up to 2 GB for a large model: use --processes 1, or fewer --axes"
        ) from None
    finally:
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        pool.shutdown(cancel_futures=True)  # its thread waits for them
        os.close(said)
        hearing.join()


def _hear(heard: int, report: Say) -> None:
    """Reports the last that each process said, until all of them have ended."""
    last: dict[str, str] = {}
    with open(heard, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            process, _, text = line.rstrip("\n").partition(" ")
            last.pop(process, None)
            if text:
                last[process] = text
                report("; ".join(last.values()))


_work: Callable[[Any, Say], Any]
"""In a process of its own: what it does."""
_said: int
"""In a process of its own: the pipe for what it says."""


def _begin(work: Callable[[Any, Say], Any], said: int) -> None:
    global _work, _said
    _work, _said = work, said
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which the process before answers for all
    torch.set_num_threads(1)  # the threads of the process before are not here


def _do(job: Any) -> tuple[Any, list[Warning]]:
    with warnings.catch_warnings(record=True) as caught:
        try:
            result = _work(job, _say)
        finally:
            _say("")
    return result, [each.message for each in caught if isinstance(each.message, Warning)]


def _say(text: str) -> None:
    """Sends a line: short enough that lines of several processes do not mix, and given up where nobody reads."""
    with suppress(OSError):
        os.write(_said, f"{os.getpid()} {text[:MOST_SAID]}\n".encode())
