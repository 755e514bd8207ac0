"""What a shard was cut of and how, noted on it: shards of other tensors, and others of the same one, look like it."""

from __future__ import annotations

from itertools import product

import torch

from ..layout import Layout, R, format_layout, local_shape
from ..mesh import Mesh
from ..plans import ShardingPlan

_CUT, _READ = "_autoshard_cut", "_autoshard_read"
_LOOKED_AT = 256
"""So many elements of a tensor tell it from another one."""


def cut_as(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> str:
    """How a tensor of this shape is cut, in words; the same of all layouts that mean the same.

    A text, as ``torch.save`` takes it along with the shard, and dynamo makes no symbols of what is in it.
    """
    alone = tuple(axis for axis, size in enumerate(mesh.shape) if size == 1)
    return f"{list(shape)} in the layout {format_layout(layout.replace(alone, R), mesh)}"


def note_cut(shard: torch.Tensor, cut: str) -> torch.Tensor:
    """Notes on a shard how it was cut. What is computed of it has no such note."""
    setattr(shard, _CUT, cut)
    return shard


def noted_cut(tensor: torch.Tensor) -> str | None:
    """How a tensor was cut, if it is what :func:`note_cut` gave."""
    return getattr(tensor, _CUT, None)


def note_read(shard: torch.Tensor, part: int | None, tensor: torch.Tensor) -> torch.Tensor:
    """Notes on a shard some elements of the tensor that a rank has read, and which part of the batch that is; None for
    all of it.
    """
    setattr(shard, _READ, (part, _some_of(tensor.detach())))
    return shard


def _some_of(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements of a tensor, the same wherever it lies in memory. This runs in every step, and copies no more."""
    step = max(1, tensor.numel() // _LOOKED_AT)
    if tensor.is_contiguous():
        return tensor.view(-1)[::step].clone()
    places = torch.arange(0, tensor.numel(), step, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]


def noted_read(tensor: torch.Tensor) -> tuple[int | None, torch.Tensor] | None:
    """What a shard was cut out of, if it is what :func:`note_read` gave."""
    return getattr(tensor, _READ, None)


def are_look_alikes(one: ShardingPlan, other: ShardingPlan) -> bool:
    """Whether on every rank the inputs of two plans of a mesh have the same shapes, and are not the same shards."""
    mesh, pairs = one.mesh, list(zip(one.inputs, other.inputs))
    if len(one.inputs) != len(other.inputs) or all(
        cut_as(a.shape, a.layout, mesh) == cut_as(b.shape, b.layout, mesh) for a, b in pairs
    ):
        return False
    return all(
        local_shape(a.shape, a.layout, mesh, rank) == local_shape(b.shape, b.layout, mesh, rank)
        for rank in product(*map(range, mesh.shape))
        for a, b in pairs
    )
