"""Work for several jobs side by side, in processes that are copies of this one.

They are forked, so that what the work needs (a captured graph) is there without being sent. A fork is safe only as long
as this process has run neither a solver nor large kernels: their threads would be missing in the copy. The command
``search`` has not, as all of that happens in the copies; a program that uses autoshard as a library may have.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import torch

from ..errors import AutoshardError

Job = TypeVar("Job")
Result = TypeVar("Result")

DoAll: TypeAlias = Callable[[Sequence[Job]], Iterator[Result]]
"""Does the work for several jobs; the results are in their order."""


class WorkerError(AutoshardError):
    """A process that worked beside this one has ended."""


@contextmanager
def side_by_side(work: Callable[[Job], Result], processes: int) -> Iterator[DoAll[Job, Result]]:
    """What does the work for several jobs, up to so many at once; jobs and results are sent, as pickles.

    With one process, and where fork is no safe way to start one (anywhere but on Linux), all is done in this one. When
    the block ends, also by Ctrl-C, so do the processes. Their warnings are given here.

    Raises:
        WorkerError: in the block, where one of the processes was ended from outside.
    """
    if processes == 1 or sys.platform != "linux":
        yield lambda jobs: map(work, jobs)
        return
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _begin, (work,))

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


_work: Callable[[Any], Any]
"""In a process of its own: what it does."""


def _begin(work: Callable[[Any], Any]) -> None:
    global _work
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a solver takes KeyboardInterrupt for the end of its time
    torch.set_num_threads(1)  # the threads of the process before are not here


def _do(job: Any) -> tuple[Any, list[Warning]]:
    with warnings.catch_warnings(record=True) as caught:
        result = _work(job)
    return result, [each.message for each in caught if isinstance(each.message, Warning)]
