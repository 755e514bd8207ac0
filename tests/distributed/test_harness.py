"""The harness itself: results by rank, tracebacks of failed ranks, and no process left behind."""

import os
import signal
import time
from importlib import import_module
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import autoshard

from . import cases, turns
from .harness import RankError, run_ranks
from .parity import device_mesh_of


def _rank_and_sum(base: int) -> tuple[int, float, int]:
    total = torch.tensor([float(base + dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def _raises_on(rank: int, pids: str) -> None:
    _note_pid(pids)
    if dist.get_rank() == rank:
        raise ValueError(f"planted on rank {rank}")
    dist.barrier()


def _hangs_on(rank: int, pids: str) -> None:
    _note_pid(pids)
    if dist.get_rank() == rank:
        print("about to sleep", flush=True)
        time.sleep(600)


def _killed_on(rank: int, pids: str) -> str:
    _note_pid(pids)
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def _both_alive_after(pids: str) -> bool:
    _note_pid(pids)
    if dist.get_rank() == 1:
        return True
    time.sleep(0.5)
    return all(_alive(int(pid)) for pid in os.listdir(pids))


def _traces(plan_text: str) -> int:
    """How often this rank traces the model of a plan."""
    plan = autoshard.parse_plan(plan_text)
    captures = import_module("autoshard.capture.capture")  # the package has a function of that name
    with mock.patch.object(captures, "trace", wraps=captures.trace) as trace:
        autoshard.parallelize(cases.make("mlp")[0], plan, device_mesh_of(plan))
    return trace.call_count


def _note_pid(folder: str) -> None:
    open(f"{folder}/{os.getpid()}", "w").close()
    dist.barrier()


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_come_in_rank_order_and_workers_are_gone() -> None:
    results = run_ranks(3, _rank_and_sum, 10)
    assert [(rank, total) for rank, total, _ in results] == [(0, 33.0), (1, 33.0), (2, 33.0)]
    assert not any(_alive(pid) for _, _, pid in results)


def test_failing_rank_is_reported_with_its_traceback_and_the_others_are_ended(tmp_path) -> None:
    began = time.monotonic()
    with pytest.raises(RankError, match=r"planted on rank 1") as caught:
        run_ranks(2, _raises_on, 1, str(tmp_path))
    assert time.monotonic() - began < 30
    assert str(caught.value).startswith("--- rank 1 failed:")
    assert "_raises_on" in str(caught.value)
    _assert_none_left(tmp_path, 2)


def test_hanging_rank_is_killed_at_the_limit_with_its_stack(tmp_path) -> None:
    with pytest.raises(RankError, match=r"rank 0 (?s:.*)about to sleep(?s:.*)_hangs_on"):
        run_ranks(2, _hangs_on, 0, str(tmp_path), timeout_s=5.0)
    _assert_none_left(tmp_path, 2)


def test_killed_rank_is_an_error_unless_it_was_to_die(tmp_path) -> None:
    with pytest.raises(RankError, match="rank 1 ended with exit code -9"):
        run_ranks(2, _killed_on, 1, str(tmp_path))
    assert run_ranks(2, _killed_on, 1, str(tmp_path), dying=(1,)) == ["alive", None]
    _assert_none_left(tmp_path, 4)


def test_no_rank_leaves_before_all_are_done(tmp_path) -> None:
    assert run_ranks(2, _both_alive_after, str(tmp_path)) == [True, True]
    _assert_none_left(tmp_path, 2)


def test_one_rank_of_a_run_captures_and_nothing_is_left_for_the_next_run_unless_runs_share_it() -> None:
    text = autoshard.dump_plan(cases.sharded_plan("mlp", "dp=2,tp=2"))
    with mock.patch.object(turns, "kept", None):
        for _ in range(2):
            assert sorted(run_ranks(4, _traces, text)) == [0, 0, 0, 1]
    assert run_ranks(4, _traces, text) == [0, 0, 0, 0]  # the process that planned has captured


def _assert_none_left(folder, count: int) -> None:
    pids = [int(path.name) for path in folder.iterdir()]
    assert len(pids) == count
    assert not any(_alive(pid) for pid in pids)
