"""Collectives to time, issued as lowered programs issue them: by the same emitter, each waited for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cost_models.samples import CollectivePoint

from ..lowering.adapter import broadcast_along
from ..lowering.emitter import GraphEmitter
from .job import Job
from .sampling import ITEM_BYTES

REDUCES = ("reduce_scatter", "all_reduce")


def collective(job: Job, point: CollectivePoint) -> Callable[[], object]:
    """Runs the collective of a point over this rank's group on its axis; all ranks must call it.

    Its ``size_bytes`` is the larger buffer: of an all-gather the gathered one, else what each rank holds.
    """
    axis = job.mesh.index(point.axis)
    if point.kind == "broadcast":  # plans have none; parameters are agreed on by it
        whole = torch.ones(point.size_bytes // ITEM_BYTES, dtype=torch.float32, device=job.device)
        return lambda: broadcast_along(whole, job.device_mesh, axis)
    ranks = job.mesh.shape[axis]
    count = point.size_bytes // ITEM_BYTES // (ranks if point.kind == "all_gather" else 1)
    emitter = GraphEmitter(job.mesh, job.groups)
    x = emitter.placeholder("x", torch.empty(count, dtype=torch.float32, device="meta"), "x")
    emit = getattr(emitter, point.kind)
    sent = emit(x, (axis,), "sum") if point.kind in REDUCES else emit(x, (axis,))
    forward = emitter.finish(sent, "Timed")
    tensor = torch.ones(count, dtype=torch.float32, device=job.device)
    return lambda: forward([tensor])
