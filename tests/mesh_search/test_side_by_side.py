"""Processes side by side give what one process gives, and end when the work does."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from autoshard.mesh_search.side_by_side import WorkerError, side_by_side
from cost_models import dump_profile

from .test_search import MODEL, two_hosts

LINUX = sys.platform == "linux"


def work(job: int, say: Callable[[str], None]) -> tuple[int, int]:
    """Gives the job and the process, and says it; warns of 2, fails at 3, ends the process at 4, never ends at 5."""
    say(f"job {job}")
    if job == 2:
        warnings.warn("two", UserWarning, stacklevel=1)
    if job == 3:
        raise ValueError("three")
    if job == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if job == 5:
        time.sleep(1000)
    return job, os.getpid()


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_order_with_warnings_and_errors(processes: int) -> None:
    with side_by_side(work, processes) as do_all:
        with pytest.warns(UserWarning, match="two"):
            found = list(do_all([2, 1, 0]))
        assert [job for job, _ in found] == [2, 1, 0]
        assert (os.getpid() in {process for _, process in found}) == (processes == 1 or not LINUX)
        with pytest.raises(ValueError, match="three"):
            list(do_all([1, 3]))
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("processes", [1, 2])
def test_what_a_process_says_is_reported(processes: int) -> None:
    said: list[str] = []
    with side_by_side(work, processes, said.append) as do_all:
        assert len(list(do_all([0, 1]))) == 2
    assert {"job 0", "job 1"} <= {part for each in said for part in each.split("; ")}


@pytest.mark.skipif(not LINUX, reason="there are no processes beside this one")
def test_a_process_that_was_killed_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(WorkerError, match="--processes 1"), side_by_side(work, 2) as do_all:
        list(do_all([1, 4]))


@pytest.mark.skipif(not LINUX, reason="there are no processes beside this one")
def test_ctrl_c_ends_them_all() -> None:
    begun_s = time.monotonic()
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt), side_by_side(work, 2) as do_all:
        list(do_all([5, 5, 5]))
    assert not multiprocessing.active_children() and time.monotonic() - begun_s < 60


@pytest.mark.thorough
def test_search_finds_the_same_in_two_processes(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "machine.yaml").write_text(dump_profile(two_hosts()))

    def printed(processes: int) -> dict[str, object]:
        asked = f"search model.py:model --hardware machine.yaml --devices 8 -o found{processes} --format json"
        arguments: Sequence[str] = [*asked.split(), "--processes", str(processes)]
        done = subprocess.run(
            [sys.executable, "-m", "autoshard", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert all(line.startswith("autoshard: ") for line in done.stderr.splitlines())  # progress, once a minute
        said: dict[str, object] = json.loads(done.stdout)
        return said

    assert printed(1) == printed(2)
    one, two = ((tmp_path / f"found{count}/plan-8.yaml").read_text() for count in (1, 2))
    assert one == two
