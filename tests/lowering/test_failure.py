"""What ranks tell each other of failures, without the ranks: boards of two of them on one store in this process."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.errors import InputError, JobError
from autoshard.lowering.agree import agreed
from autoshard.lowering.board import Board
from autoshard.lowering.failure import Failures

from ..one_process import one_rank


@pytest.fixture
def boards() -> list[Board]:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    return [Board(store, "module/", rank, (0, 1)) for rank in (0, 1)]


def fails(failures: Failures, error: Exception) -> None:
    with failures.telling("the forward"):
        raise error


def breaks_off(failures: Failures) -> str:
    """What a rank says whose collective breaks off."""
    with pytest.raises(JobError) as caught:
        fails(failures, RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"))
    return str(caught.value)


def test_a_failure_is_quoted_by_the_other_rank(boards: list[Board]) -> None:
    ours, theirs = map(Failures, boards)
    with pytest.raises(InputError, match="a batch of another size"):
        fails(ours, InputError("a batch of another size"))
    assert "rank 0 failed in the forward: InputError: a batch of another size; this rank (1) stood in" in breaks_off(
        theirs
    )


def test_a_failure_that_the_rank_survived_is_not_quoted_later(boards: list[Board]) -> None:
    ours, theirs = map(Failures, boards)
    with pytest.raises(InputError):
        fails(ours, InputError("refused, and caught by the job"))
    with ours.telling("the forward"):
        pass
    said = breaks_off(theirs)
    assert "no rank could say why" in said and "Connection closed by peer" in said and "refused" not in said


def test_a_failure_that_follows_from_another_is_not_told_as_a_reason(boards: list[Board]) -> None:
    ours, theirs = map(Failures, boards)
    breaks_off(ours)
    assert "no rank could say why" in breaks_off(theirs)


def test_a_rank_that_does_not_come_or_does_not_get_ready_is_named(boards: list[Board]) -> None:
    with pytest.raises(JobError, match=r"waited 1 s for the other ranks, comparing: rank 1 did not come"):
        with agreed(boards[0], "comparing"):
            pass
    boards[1].put("capturing/came/1", "")
    with pytest.raises(JobError, match=r"capturing: rank 1 did not get ready"):
        with agreed(boards[0], "capturing"):
            pass


def test_a_stage_that_fails_on_one_rank_fails_on_the_other_with_its_reason(boards: list[Board]) -> None:
    with pytest.raises(MemoryError), agreed(boards[1], "sharding"):
        raise MemoryError("no room")
    with (
        pytest.raises(JobError, match=r"^rank 1 failed while sharding: MemoryError: no room$"),
        agreed(boards[0], "sharding"),
    ):
        pass


def test_activation_checkpointing_tells_of_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the second forward by an exception, as soon as everything is saved."""
    told: list[str] = []
    monkeypatch.setattr(Failures, "_tell", lambda self, text: told.append(text))
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    with one_rank() as mesh:
        module = autoshard.auto_parallelize(model, mesh, x)
        checkpoint(module, x, use_reentrant=False).to_local().sum().backward()
    assert told == [] and all(p.grad is not None for p in module.parameters())
