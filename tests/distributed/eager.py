"""Redistributions carried out at once, with functional collectives, on plain tensors."""

from __future__ import annotations

import zlib
from itertools import pairwise
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autoshard.layout import Layout
from autoshard.lowering.match import mesh_of
from autoshard.redistribution import Shard, run_step


class EagerEmitter:
    """Implements :class:`autoshard.redistribution.Emitter` on this rank's tensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def call(self, op: Any, *args: Any) -> Any:
        return op(*args)

    def all_gather(self, x: Tensor, axis: int) -> Tensor:
        assert x.is_contiguous()
        return funcol.wait_tensor(funcol.all_gather_tensor(x, 0, (self._mesh, axis)))

    def reduce_scatter(self, x: Tensor, axis: int, reduce: str) -> Tensor:
        assert x.is_contiguous()
        return funcol.wait_tensor(funcol.reduce_scatter_tensor(x, reduce, 0, (self._mesh, axis)))

    def all_reduce(self, x: Tensor, axis: int, reduce: str) -> Tensor:
        assert x.is_contiguous()
        return funcol.wait_tensor(funcol.all_reduce(x, reduce, (self._mesh, axis)))

    def all_to_all(self, x: Tensor, axis: int) -> Tensor:
        assert x.is_contiguous()
        parts = self._mesh.size(axis)
        each = [x.shape[0] // parts] * parts
        return funcol.wait_tensor(funcol.all_to_all_single(x, each, each, (self._mesh, axis)))


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
