"""One process for each row, so that one that takes too long, or too much memory, costs no other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

from autoshard.errors import AutoshardError
from published_predictions import Prediction
from published_runs import CannotBuild, Run

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What became of a row, and how long it took: its prediction, or in a sentence why there is none."""

    run: Run
    found: Prediction | str
    took_s: float


def outcomes(runs: Iterable[Run], work: Callable[[Run], Prediction], seconds: float) -> Iterator[Outcome]:
    """What becomes of each row, as it comes.

    Args:
        work: makes the prediction, in a process of its own, to which it and its arguments are sent.
        seconds: what a row may take; then its process and those that it started are ended.
    """
    context = multiprocessing.get_context("forkserver")  # whose children have loaded torch, and run nothing else
    context.set_forkserver_preload(["autoshard.api", "autoshard.plans.simulation", "autoshard.measure"])
    for run in runs:
        started = time.monotonic()
        if reason := _outcome(Run.check, run):
            yield Outcome(run, reason, 0.0)
            continue
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_predicted, args=(run, work, sender))
        process.start()
        sender.close()
        try:
            found = _received(receiver, process, seconds)
        finally:
            _end(process)
        yield Outcome(run, found, time.monotonic() - started)


def _received(receiver: Connection, process: BaseProcess, seconds: float) -> Prediction | str:
    if not receiver.poll(seconds):
        return f"it takes more than {seconds:g} s (--seconds)"
    try:
        found: Prediction | str = receiver.recv()
    except EOFError:
        process.join(5)
        return f"its process ended with {process.exitcode}; below 0 that is a signal, -9 often for want of memory"
    return found


def _predicted(run: Run, work: Callable[[Run], Prediction], sender: Connection) -> None:
    os.setpgid(0, 0)  # so that what it starts can be ended with it
    sender.send(_outcome(work, run))


def _outcome(work: Callable[[Run], T], run: Run) -> T | str:
    """What comes of it, or in a sentence why nothing does."""
    try:
        return work(run)
    except (CannotBuild, AutoshardError) as reason:
        return str(reason).partition("\n")[0]
    except Exception as error:  # a row that we do not understand must not stop the others
        return f"{type(error).__name__}: {error}".partition("\n")[0]


def _end(process: BaseProcess) -> None:
    assert process.pid is not None
    for end in (lambda: os.killpg(process.pid, signal.SIGKILL), process.kill):  # type: ignore[arg-type]
        with contextlib.suppress(ProcessLookupError, PermissionError):
            end()
    process.join()
    process.close()
