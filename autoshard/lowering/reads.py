"""That ranks have read the same samples where they are to: no rank alone sees what is a full batch and what a part."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from .adapter import device_of, maximum, unwatched
from .cuts import noted_read

_NOBODY = -(1 << 40)
"""In the place of a checksum that no rank has."""


def check_reads(given: Mapping[str, torch.Tensor], mesh: DeviceMesh) -> None:
    """Compares what ranks have given :func:`autoshard.shard_inputs`, of a few elements each: full batches are equal on
    all ranks, and so is a part on all that hold it. Every rank of the mesh must call it.

    Args:
        given: the shards of a call by name; those that were made otherwise are not compared.

    Raises:
        InputError: two are not equal, on all ranks.
    """
    with unwatched():
        seen = torch.full((len(given), mesh.size() + 1, 2), _NOBODY, dtype=torch.int64)
        for number, tensor in enumerate(given.values()):
            if (read := noted_read(tensor)) is not None:
                part, elements = read
                checksum = zlib.crc32(bytes(elements.cpu().view(torch.uint8).tolist()))
                seen[number, 0 if part is None else part + 1] = torch.tensor([checksum, -checksum])
        largest, smallest = maximum(seen.to(device_of(mesh)), mesh).cpu().unbind(2)
        differ = ((largest != _NOBODY) & (largest != -smallest)).tolist()
    for name, parts in zip(given, differ):
        if parts[0]:
            raise InputError(
                f"{name} was given to shard_inputs as a full batch, and ranks gave different ones; a full batch is "
                "equal on all ranks. Where each rank reads a part of it (autoshard.sampler), the batch is larger than "
                f"what a rank has: shard_inputs(..., batch=len({name}) * sampler.num_replicas)"
            )
        if any(parts):
            raise InputError(
                f"ranks that hold the same part of {name} have read different samples; autoshard.sampler(plan, mesh, "
                "dataset) says which ones each rank is to read, in the place of torch's DistributedSampler"
            )
