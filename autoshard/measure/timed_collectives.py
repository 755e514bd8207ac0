"""Collectives to time, issued by the emitter of lowered programs: waited for at once, or behind kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import fx

from cost_models.collective_kinds import RedistributionKind as CollectiveKind
from cost_models.samples import CollectivePoint, TogetherPoint

from ..lowering.adapter import WAIT, broadcast_along
from ..lowering.emitter import GraphEmitter
from .job import Job
from .kernels import kernel
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
    emitter, sent, tensor = _sent(job, point)
    forward = emitter.finish(emitter.wait(sent), "Timed")
    return lambda: forward([tensor])


def together(job: Job, point: TogetherPoint) -> Callable[[], object]:
    """Runs kernels while a collective is on its way, and waits for it; all ranks must call it."""
    emitter, sent, tensor = _sent(job, point.collective)
    issue = emitter.finish(sent, "Issued")
    compute = kernel(job, point.kernel)

    def run() -> object:
        arriving = issue([tensor])
        for _ in range(point.kernels):
            compute()
        return WAIT(arriving)

    return run


def _sent(job: Job, point: CollectivePoint) -> tuple[GraphEmitter, fx.Node, torch.Tensor]:
    """A graph in which the collective of a point is on its way, the node that issued it, and what it is called with."""
    axis = job.mesh.index(point.axis)
    count = point.size_bytes // ITEM_BYTES // (job.mesh.shape[axis] if point.kind == "all_gather" else 1)
    emitter = GraphEmitter(job.mesh, job.groups)
    x = emitter.placeholder("x", torch.empty(count, dtype=torch.float32, device="meta"), "x")
    sent = emitter.issue(cast(CollectiveKind, point.kind), x, (axis,), "sum" if point.kind in REDUCES else "")
    return emitter, sent, torch.ones(count, dtype=torch.float32, device=job.device)
