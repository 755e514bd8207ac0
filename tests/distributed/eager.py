"""Redistributions carried out at once, with functional collectives, on plain tensors."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers torch.ops._c10d_functional
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard.layout import Layout
from autoshard.lowering.adapter import group_names
from autoshard.lowering.match import mesh_of
from autoshard.redistribution.execution import Shard, run_step

_c10d = torch.ops._c10d_functional


class EagerEmitter:
    """Implements :class:`autoshard.redistribution.execution.Emitter` on this rank's tensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        return op(*args, **kwargs)

    def value(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        return self._collective(_c10d.all_gather_into_tensor, axes, x, mesh_of(self._mesh).parts(axes))

    def reduce_scatter(self, x: Tensor, axes: tuple[int, ...], reduce: str) -> Tensor:
        return self._collective(_c10d.reduce_scatter_tensor, axes, x, reduce, mesh_of(self._mesh).parts(axes))

    def all_reduce(self, x: Tensor, axes: tuple[int, ...], reduce: str) -> Tensor:
        return self._collective(_c10d.all_reduce, axes, x, reduce)

    def all_to_all(self, x: Tensor, axes: tuple[int, ...]) -> Tensor:
        parts = mesh_of(self._mesh).parts(axes)
        each = [x.shape[0] // parts] * parts
        return self._collective(_c10d.all_to_all_single, axes, x, each, each)

    def _collective(self, op: Any, axes: tuple[int, ...], x: Tensor, *args: Any) -> Tensor:
        assert x.is_contiguous()
        link = mesh_of(self._mesh).named(axes)
        return _c10d.wait_tensor(op(x, *args, group_names(self._mesh, [link])[link]))


def run_path(x: Tensor, path: tuple[Layout, ...], shape: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    """This rank's shard at the end of a path, from its shard at the beginning."""
    emitter = EagerEmitter(mesh)
    shard = Shard(shape, mesh_of(mesh), tuple(mesh.get_coordinate()))
    for before, after in pairwise(path):
        x = run_step(emitter, x, before, after, shard)
    return x


def pieces_of(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What the ranks hold of one tensor before it is cut: shape (*sizes, *shape), equal along axes that are not P.

    Whole numbers, so that sums are exact in any order; the addends along P axes differ from rank to rank.
    """
    held = [size if placement.kind == "P" else 1 for size, placement in zip(sizes, layout)]
    generator = torch.Generator().manual_seed(zlib.crc32(repr((shape, layout, sizes)).encode()))
    values = torch.randint(-50, 50, (*held, *shape), generator=generator)
    return values.to(dtype).expand(*sizes, *shape)


def combined(pieces: Tensor, before: Layout, after: Layout) -> Tensor:
    """What each rank ought to hold, before it is cut, once the P axes that ``after`` no longer has are combined."""
    for axis, (old, new) in enumerate(zip(before, after)):
        if old.kind == "P" and new.kind != "P":
            reduce = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}[old.reduce]
            pieces = reduce(pieces, dim=axis, keepdim=True).expand(pieces.shape)
    return pieces
