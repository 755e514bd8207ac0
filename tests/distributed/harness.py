"""Real gloo processes for tests: one per rank, on the loopback interface, each with a deadline of its own.

:func:`run_ranks` starts the processes, waits for all of them and returns what the function gave on each rank. Processes
are forked from a server that is made warm once (``multiprocessing``'s forkserver, :mod:`tests.distributed.warmed`; no
thread runs in it), so that eight of them start in a second on two cores. They capture a model once for all of them
(:mod:`tests.distributed.turns`), and their groups have one thread each (:mod:`tests.distributed.gloo`). A worker writes
its result to a file and waits until all have one: a rank that needs nobody would otherwise be gone while others still
connect to it. It destroys its group, then ``os._exit(0)``: interpreters with gloo threads sometimes abort as they end.
Whatever happens, no process is left.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from . import turns

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
_PRELOAD = ["pytest", "tests.distributed.warmed"]
_GRACE_S = 3.0
_TAIL = 4000  # characters of a worker's output that an error quotes


class RankError(AssertionError):
    """A rank failed, died or did not end in time; the message holds the traceback and output of each such rank."""


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    group_timeout_s: float = 30.0,
    dying: Collection[int] = (),
) -> list[Any]:
    """Calls ``function(*args)`` on every rank of a fresh gloo group of ``world`` processes.

    Args:
        function: importable by name; runs with the default process group initialised.
        timeout_s: for all of it; afterwards every worker is killed.
        group_timeout_s: the timeout of the process group.
        dying: ranks that are to die: their end is no failure, and their result is None.

    Returns:
        What the function returned, by rank.

    Raises:
        RankError: a rank raised, died or was killed. Others get three seconds to end by themselves.
    """
    context = multiprocessing.get_context("forkserver")
    os.environ.update(_ENVIRONMENT)
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        cache = str(turns.kept or f"{folder}/cache")
        processes = [
            context.Process(
                target=_worker,
                args=(rank, world, folder, cache, timeout_s, group_timeout_s, dying, function, args),
                name=f"rank {rank}",
                daemon=True,
            )
            for rank in range(world)
        ]
        started = []
        try:
            for process in processes:
                process.start()
                started.append(process)
            overdue = _wait(processes, Path(folder), timeout_s, dying)
        finally:
            for process in started:
                process.kill()
                process.join()
        return _results(Path(folder), processes, overdue, timeout_s, dying)


def caught(function: Callable[[], Any]) -> tuple[str, str]:
    """The type and the text of the exception that a call raises; empty if it raises none."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _wait(processes: list[Any], folder: Path, timeout_s: float, dying: Collection[int]) -> set[int]:
    """Waits for the end of all; returns the ranks that were still running at the deadline."""
    deadline = time.monotonic() + timeout_s
    running = dict(enumerate(processes))
    failed = False
    while running and (left := deadline - time.monotonic()) > 0:
        wait([process.sentinel for process in running.values()], timeout=left)
        for rank, process in list(running.items()):
            if not process.is_alive():
                del running[rank]
                if not failed and rank not in dying and not (folder / f"{rank}.result").exists():
                    failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
    return set(running)


def _results(
    folder: Path, processes: list[Any], overdue: set[int], timeout_s: float, dying: Collection[int]
) -> list[Any]:
    results: list[Any] = []
    problems = []
    for rank, process in enumerate(processes):
        path = folder / f"{rank}.result"
        if path.exists():
            results.append(pickle.loads(path.read_bytes()))
            continue
        results.append(None)
        if rank in dying and rank not in overdue:
            continue
        error = folder / f"{rank}.error"
        what = error.read_text() if error.exists() else f"ended with exit code {process.exitcode} and without a result"
        if rank in overdue and not error.exists():
            what = f"did not end in time (limit {timeout_s:g} s) and was killed"
        printed = folder / f"{rank}.output"
        tail = printed.read_text(errors="replace")[-_TAIL:].strip() if printed.exists() else ""
        # the first to fail is the one to read first: the others often fail because of it, most of all of one that died
        when = error.stat().st_mtime if error.exists() else float("inf") if rank in overdue else 0.0
        problems.append((when, f"--- rank {rank} {what}" + (f"\n--- its output: {tail}" if tail else "")))
    if problems:
        raise RankError("\n".join(text for _, text in sorted(problems)))
    return results


def _worker(
    rank: int,
    world: int,
    folder: str,
    cache: str,
    timeout_s: float,
    group_timeout_s: float,
    dying: Collection[int],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    output = os.open(f"{folder}/{rank}.output", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    faulthandler.enable()
    # also ends the worker, with the stacks of all its threads, where nobody is left to kill it
    faulthandler.dump_traceback_later(max(timeout_s - 1.0, 0.5), exit=True)
    code = 1
    try:
        import torch
        import torch.distributed as dist

        from .gloo import use_one_thread

        torch.set_num_threads(1)
        use_one_thread()
        turns.take_turns(folder, cache)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=group_timeout_s),
        )
        _write(f"{folder}/{rank}.result", pickle.dumps(function(*args)))
        _wait_for_others(folder, set(range(world)) - set(dying), group_timeout_s)
        dist.destroy_process_group()
        code = 0
    except BaseException:
        _write(f"{folder}/{rank}.error", f"failed:\n{traceback.format_exc()}".encode())
    sys.stdout.flush()
    os._exit(code)


def _wait_for_others(folder: str, ranks: Collection[int], limit_s: float) -> None:
    """Returns once each of the ranks has written its result or its error, or the limit is over."""
    deadline = time.monotonic() + limit_s
    left = {f"{folder}/{rank}" for rank in ranks}
    while left and time.monotonic() < deadline:
        time.sleep(0.005)
        left = {path for path in left if not os.path.exists(f"{path}.result") and not os.path.exists(f"{path}.error")}


def _write(path: str, content: bytes) -> None:
    Path(f"{path}.part").write_bytes(content)
    os.rename(f"{path}.part", path)
