"""A parallel module on one process: torch's fake backend stands for the other ranks, and moves nothing.

Values are wrong, but operators, shapes and what is alive when are those of the real run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard.lowering import MemoryLog
from autoshard.plans import ShardingPlan

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@contextmanager
def fake_ranks(world: int, rank: int = 0) -> Iterator[None]:
    """A default process group of which only this rank exists.

    What DTensor remembers of operators names meshes, and what was seen on one is given for an equal one: a mesh of an
    ended world in the place of the next one's, by which torch.compile fails (torch 2.13; with DTensors alone too).
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        _clear_sharding_prop_cache()
        dist.destroy_process_group()


def measured(
    model: torch.nn.Module, args: tuple[torch.Tensor, ...], plan: ShardingPlan, optimizer: str, rank: int = 0
) -> MemoryLog:
    """Trains three steps on one rank of a plan's mesh; the memory of the last."""
    with fake_ranks(plan.mesh.size, rank):
        mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axes)
        parallel = autoshard.parallelize(model, plan, mesh, args)
        steps = OPTIMIZERS[optimizer](parallel.parameters())
        for _ in range(3):
            shards = autoshard.shard_inputs(plan, mesh, *args)
            state = [value for each in steps.state.values() for value in each.values() if torch.is_tensor(value)]
            with autoshard.measure_memory(*parallel.parameters(), *parallel.buffers(), *state, *shards) as log:
                parallel(*shards).backward()
                steps.step()
            steps.zero_grad()
        return log


@contextmanager
def one_rank() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, on which values are right: what autograd does with a module can be seen on it."""
    with fake_ranks(1):
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
