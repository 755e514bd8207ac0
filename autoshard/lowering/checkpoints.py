"""What ``torch.distributed.checkpoint`` saves and loads of tensors that are cut in parts: each part as a block.

torch 2.13 takes the shard of any DTensor for one block, refuses to save what is cut in parts, as blocks of ranks would
overlap, and gives ranks the wrong values where ``set_state_dict`` is given full states. A checkpoint knows blocks only,
so that one saved with parts is loaded without, and the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from ..layout import Layout, local_ranges
from ..mesh import Mesh
from .adapter import cut_full_states_by, gather_parts
from .placements import as_dtensor, layout_of
from .shards import local_part


@dataclass(frozen=True)
class _Chunk:
    """A block of a tensor that a rank holds, and where it lies in the whole."""

    held: torch.Tensor
    offsets: torch.Size

    @property
    def stored(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=self.offsets, sizes=self.held.size())


@cache
def save_parts() -> None:
    """Has torch take DTensors that are cut in parts apart and gather them; others stay as they are. Once for all."""
    write_items, chunk_list, get_shard = (
        getattr(DTensor, name) for name in ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
    )

    def create_write_items(self: DTensor, fqn: str, object: Any) -> list[WriteItem]:
        chunks = _chunks(self)
        if not chunks:
            return write_items(self, fqn, object)  # type: ignore[no-any-return]
        properties = TensorProperties.create_from_tensor(self.to_local())
        data = (TensorWriteData(chunk=chunk.stored, properties=properties, size=self.size()) for chunk in chunks)
        indices = (MetadataIndex(fqn, chunk.offsets) for chunk in chunks)
        return [WriteItem(index, WriteItemType.SHARD, tensor_data=each) for index, each in zip(indices, data)]

    def create_chunk_list(self: DTensor) -> list[ChunkStorageMetadata]:
        return [chunk.stored for chunk in _chunks(self)] or chunk_list(self)

    def get_tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
        found = [chunk.held for chunk in _chunks(self) if chunk.offsets == index.offset]
        return found[0] if found else get_shard(self, index)

    changed = {
        "__create_write_items__": create_write_items,
        "__create_chunk_list__": create_chunk_list,
        "__get_tensor_shard__": get_tensor_shard,
    }
    for name, method in changed.items():
        setattr(DTensor, name, method)
    cut_full_states_by(_cut_like)
    gather_parts()


def _in_parts(tensor: DTensor) -> tuple[Layout, Mesh, tuple[int, ...]] | None:
    """The layout of a tensor that is cut in parts, its mesh, and where this rank stands in it; None of any other."""
    layout, coordinate = layout_of(tensor.placements), tensor.device_mesh.get_coordinate()
    if layout is None or coordinate is None or not layout.has_parts:
        return None
    shape = tuple(tensor.device_mesh.shape)
    return layout, Mesh(tuple(f"axis{i}" for i in range(len(shape))), shape), tuple(coordinate)


def _cut_like(held: DTensor, whole: torch.Tensor) -> DTensor | None:
    """A whole tensor cut as one is that is cut in parts, which gets its values unless it has no memory."""
    found = _in_parts(held) if isinstance(held, DTensor) else None
    if found is None:
        return None
    local = local_part(whole.detach(), *found)
    if held.is_meta:
        return as_dtensor(local, tuple(held.shape), found[0], held.device_mesh)
    held.to_local().detach().copy_(local)
    return held


def _chunks(tensor: DTensor) -> list[_Chunk]:
    """The blocks that this rank holds of a tensor that is cut in parts; none of any other."""
    placed = _in_parts(tensor)
    if placed is None:
        return []
    layout, mesh, coordinate = placed
    ranges = [local_ranges(n, layout, dim, mesh, coordinate) for dim, n in enumerate(tensor.shape)]
    found, local = [], tensor.to_local()
    for each in product(*map(_placed, ranges)):
        held = local
        for dim, (begins, (start, stop)) in enumerate(each):
            held = held.narrow(dim, begins, stop - start)
        found.append(_Chunk(held, torch.Size(start for _, (start, _) in each)))
    return found


def _placed(ranges: list[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    """Each range of a dim, behind where it begins in what a rank holds."""
    placed, begins = [], 0
    for start, stop in ranges:
        placed.append((begins, (start, stop)))
        begins += stop - start
    return placed
