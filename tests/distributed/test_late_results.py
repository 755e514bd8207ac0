"""A loss that is made when the caller reads it is the loss, whoever reads it when, and no rank waits for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.lowering.unread import Unread

from . import cases
from .harness import run_ranks
from .parity import device_mesh_of

WHO_READS = {"nobody": (), "the first rank": (0,), "all but the first": (1, 2, 3), "all": (0, 1, 2, 3)}


def _steps(case: str, text: str) -> list[Any]:
    """Losses as they were read before the backward and behind it, and the first gradient, for each way to read."""
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    model, batch = cases.make(case)
    parallel = autoshard.parallelize(model, plan, mesh)
    shards = autoshard.shard_inputs(plan, mesh, *batch)
    found = []
    for ranks in WHO_READS.values():
        loss = parallel(*shards)
        assert type(loss) is Unread
        early = float(loss) if dist.get_rank() in ranks else None
        loss.backward()
        assert type(loss) is torch.Tensor
        first = next(parallel.parameters())
        assert first.grad is not None
        found.append((early, float(loss), first.grad.full_tensor()))
        first.grad = None
        parallel(*shards)  # nobody reads it, nor goes backward
        with torch.no_grad():
            assert type(parallel(*shards)) is torch.Tensor
    return found


class Two(nn.Module):
    """A loss, and a view of a number that is added to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        squares = self.linear(x).square()
        auxiliary = self.linear.weight.square().sum()
        return squares.mean() + auxiliary, auxiliary.view(1)


PINS = ["x=dp:S(0)", "*/addmm=dp:S(0)", "*/pow=dp:S(0)", "*/sum=dp:R"]


def _written_into(text: str) -> tuple[bool, float]:
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    x = torch.ones(8, 4)
    loss, other = autoshard.parallelize(Two(), plan, mesh, (x,))(*autoshard.shard_inputs(plan, mesh, x))
    is_late = type(loss) is Unread
    with torch.no_grad():
        other.to_local().zero_()
    return is_late, loss.item()


def test_what_the_caller_writes_into_before_the_loss_is_read_does_not_change_it() -> None:
    plan = autoshard.plan(Two(), (torch.ones(8, 4),), mesh="dp=2", hardware="cpu-gloo", pins=PINS)
    loss = Two()(torch.ones(8, 4))[0].item()
    for is_late, found in run_ranks(2, _written_into, autoshard.dump_plan(plan)):
        assert is_late and found == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("case", ["mlp", "gpt2"])
def test_the_loss_is_the_loss_whoever_reads_it_when(case: str) -> None:
    plan = cases.baseline_plan(case, "dp=2,tp=2", "ddp")
    assert "output.0" in plan.deferred
    model, batch = cases.make(case)
    loss = model(*batch)
    loss.backward()
    gradient = next(model.parameters()).grad
    for rank, found in enumerate(run_ranks(4, _steps, case, autoshard.dump_plan(plan))):
        for ranks, (early, late, shard) in zip(WHO_READS.values(), found, strict=True):
            assert (early is not None) == (rank in ranks)
            for value in (early, late):
                assert value is None or value == pytest.approx(loss.item(), rel=1e-5)
            torch.testing.assert_close(shard, gradient)
