"""Parallel modules on a mesh of one rank, in this process: all that is not communication, as it is in any job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard


@contextmanager
def one_rank() -> Iterator[None]:
    """A default process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def parallel_of(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """Plans a model for one rank and parallelizes it; within :func:`one_rank`. Takes the model apart."""
    plan = autoshard.plan(model, args, kwargs, mesh="dp=1", hardware="cpu-gloo")
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    return autoshard.parallelize(model, plan, mesh, args, kwargs)
