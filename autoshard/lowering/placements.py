"""Our layouts as DTensor's placements."""

from __future__ import annotations

from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..layout import Layout
from .adapter import DTensorSpec, dtensor_of, made_spec


def placements_of(layout: Layout) -> tuple[Placement, ...]:
    """One DTensor placement per mesh axis."""
    made = {"R": lambda p: Replicate(), "S": lambda p: Shard(p.dim), "P": lambda p: Partial(p.reduce)}
    return tuple(made[placement.kind](placement) for placement in layout)


def as_dtensor(local: torch.Tensor, shape: tuple[int, ...], layout: Layout, mesh: DeviceMesh) -> DTensor:
    """A DTensor of a global shape from this rank's shard."""
    return dtensor_of(local, spec_of(local.dtype, shape, layout, mesh))


def spec_of(dtype: torch.dtype, shape: tuple[int, ...], layout: Layout, mesh: DeviceMesh) -> DTensorSpec:
    """What the DTensors of one dtype, shape and layout share. It belongs to this mesh, not to an equal one."""
    return made_spec(mesh, placements_of(layout), torch.Size(shape), strides_of(shape), dtype)


def readable(shard: torch.Tensor) -> torch.Tensor:
    """A shard as local graphs are written for: contiguous, and no lazy conjugate or negative of another tensor."""
    return shard.resolve_conj().resolve_neg().contiguous()


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor: 2 x 3 x 4 has 12, 4, 1."""
    return tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
