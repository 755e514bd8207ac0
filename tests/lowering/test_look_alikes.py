"""Shards of several plans that look alike: each runs the plan that it was cut for, or nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.errors import InputError
from autoshard.plans import ShardingPlan

from ..fuzz.judge import one_after_another
from ..fuzz.ranks import run_ranks
from ..one_process import fake_ranks
from .sessions import full


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum()


def rows(count: int) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


def plans(model: nn.Module) -> list[ShardingPlan]:
    """For 8 rows that are cut and for 4 that are not, and for an evaluation of 4: 4 rows on each rank."""
    options: dict[str, Any] = {"mesh": "a=2", "hardware": "cpu-gloo", "cache": False}
    first = autoshard.plan(model, (rows(8),), pins=["x=a:S(0)", "linear.weight=a:S(0)"], **options)
    options |= {"held_as": first, "pins": ["x=a:R"]}
    return [
        first,
        autoshard.plan(model, (rows(4),), **options),
        autoshard.plan(model, (rows(4),), **options, evaluation=True),
    ]


@pytest.mark.parametrize("grad", [True, False])
def test_a_shard_runs_the_plan_that_it_was_cut_for(grad: bool) -> None:
    model = Sum()
    made = plans(model)
    ranks = [copy.deepcopy(model) for _ in range(2)]

    def one(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        parallel = autoshard.parallelize(ranks[rank], made, mesh)
        given = [autoshard.shard_inputs(plan, mesh, rows(plan.batch or 0)) for plan in made[: 3 - grad]]
        with torch.set_grad_enabled(grad):
            found = [full(parallel(*shards)).detach() for shards in given]
            if grad:  # of those without a backward there is one for each shape
                with pytest.raises(InputError, match="plans 1 and 2 of this module"):
                    parallel(given[0][0].clone())
        return found

    with one_after_another():
        results = run_ranks(2, one)
    for found in results:
        assert not isinstance(found, BaseException), found
        for loss, expected in zip(found, (8, 4, 4)):
            torch.testing.assert_close(loss, model(rows(expected)).detach())


def test_a_compiled_call_knows_what_its_shards_were_cut_for() -> None:
    model = Sum()
    made = plans(model)[:2]
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
        parallel = torch.compile(autoshard.parallelize(model, made, mesh), backend="aot_eager", fullgraph=True)
        for plan in made:
            (shard,) = autoshard.shard_inputs(plan, mesh, rows(plan.batch or 0))
            parallel(shard)
        with pytest.raises(Exception, match="plans 1 and 2 of this module"):
            parallel(shard.clone())
