"""A rank that fails in a step says so before it ends; the others say which rank failed and why, as far as known."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import autoshard
from autoshard.errors import InputError, JobError
from autoshard.lowering.board import Board
from autoshard.lowering.failure import Failures

from . import cases
from .harness import caught, run_ranks
from .parity import device_mesh_of

CASE = "mlp odd"
AXES = "dp=2,tp=2"


@pytest.fixture(scope="module")
def plan_text() -> str:
    return autoshard.dump_plan(cases.sharded_plan(CASE, AXES))


def _steps(text: str, victim: int, how: str) -> tuple[str, str]:
    """Three steps, in the second of which the victim fails and then ends."""
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    model, batch = cases.make(CASE)
    parallel = autoshard.parallelize(model, plan, mesh)
    shards = autoshard.shard_inputs(plan, mesh, *batch)
    # a refusal that the job survives, on every rank, is not why it breaks off later
    assert caught(lambda: parallel(shards[0].double(), shards[1]))[0] == InputError.__name__
    parallel(*shards).backward()
    dist.barrier()
    is_victim = dist.get_rank() == victim

    unpack = _no_memory if is_victim and how == "backward" else _as_it_is

    def steps() -> None:
        for _ in range(2):
            given: tuple[Any, ...] = (shards[0][:1], shards[1]) if is_victim and how == "input" else shards
            with torch.autograd.graph.saved_tensors_hooks(_as_it_is, unpack):
                loss = parallel(*given)
            if is_victim and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()

    found = caught(steps)
    if is_victim:
        os._exit(1)
    return found


def _as_it_is(x: Any) -> Any:
    return x


def _no_memory(x: Any) -> Any:
    raise MemoryError("no room for the gradients")


@pytest.mark.parametrize(
    ("how", "victim", "said"),
    [
        (
            "input",
            3,
            "rank 3 failed in the forward: InputError: x has shape [1, 9]; the plan was made for [7, 9] in all",
        ),
        ("backward", 0, "rank 0 failed in the backward: MemoryError: no room for the gradients"),
        ("killed", 2, "no rank could say why"),
    ],
)
def test_the_others_say_which_rank_failed_and_why(plan_text: str, how: str, victim: int, said: str) -> None:
    results = run_ranks(4, _steps, plan_text, victim, how, dying=(victim,), group_timeout_s=6.0)
    assert results.pop(victim) is None
    for kind, text in results:
        assert kind == JobError.__name__, text
        assert said in text and "this rank (" in text and ") stood in the " in text, text


def _printed(text: str) -> list[str]:
    """What each rank prints that ends with an error: one that all have in capture, one that all have in a step, and one
    that rank 2 alone has, in capture.
    """
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    model, batch = cases.make(CASE)
    parallel = autoshard.parallelize(cases.make(CASE)[0], plan, mesh)
    shards = autoshard.shard_inputs(plan, mesh, *batch)
    odd = dist.get_rank() == 2
    ends = [
        lambda: autoshard.parallelize(model, plan, mesh, (batch[0][:, :3], batch[1])),
        lambda: parallel(shards[0][:, :3], shards[1]),
        lambda: autoshard.parallelize(model, plan, mesh, (batch[0][:, :3], batch[1]) if odd else batch),
    ]
    return [_end(call) for call in ends]


def _end(call: Callable[[], Any]) -> str:
    """What Python prints of an error that nothing catches."""
    printed = io.StringIO()
    try:
        call()
    except Exception as error:
        with contextlib.redirect_stderr(printed):
            sys.excepthook(type(error), error, error.__traceback__)
    dist.barrier()
    return printed.getvalue()


def test_one_rank_prints_a_traceback_and_the_others_a_line(plan_text: str) -> None:
    printed = run_ranks(4, _printed, plan_text)
    for texts in zip(*printed):
        full = [rank for rank, text in enumerate(texts) if "Traceback" in text]
        assert len(full) == 1, texts
        for rank, text in enumerate(texts):
            assert rank in full or (text.count("\n") == 1 and text.startswith(f"autoshard: rank {rank} ")), text
    assert all("reduction dim" in text for text in [*next(zip(*printed)), printed[0][2]])  # each has the words
    assert "Traceback" in printed[2][2]


def _without_a_store(port: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """Rank 0 holds a store, and ends; what rank 1 says of a collective that breaks off, and of a failure of its own."""
    store = dist.TCPStore("127.0.0.1", port, is_master=dist.get_rank() == 0)
    board = Board(store, "test/", dist.get_rank(), (0, 1))
    if board.rank == 0:
        board.put("here/0", "")
        assert board.wait("here/1")
        os._exit(1)
    assert board.wait("here/0")
    board.put("here/1", "")  # the last that it asks of the store: rank 0 ends as soon as it reads this
    failures = Failures(board)

    def reduce() -> None:
        with failures.telling("the forward"):
            dist.all_reduce(torch.ones(1))

    def fail() -> None:
        with failures.telling("the forward"):
            raise InputError("a batch of another size")

    return caught(reduce), caught(fail)


def test_a_store_that_is_gone_holds_nobody_up() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _, (broken, own) = run_ranks(2, _without_a_store, port, dying=(0,), group_timeout_s=6.0)
    assert broken[0] == JobError.__name__ and "the job's store is gone" in broken[1]
    assert own == (InputError.__name__, "a batch of another size")
