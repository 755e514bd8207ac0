"""Collectives to time, issued by the emitter of lowered programs: waited for at once, alone or behind a row of kernels,
or on their way beside kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import fx

from cost_models.collective_kinds import RedistributionKind as CollectiveKind
from cost_models.samples import CollectivePoint, RowPoint, TogetherPoint

from ..lowering.adapter import WAIT, broadcast_along
from ..lowering.emitter import GraphEmitter
from .job import Job
from .kernels import in_a_row, kernel
from .sampling import ITEM_BYTES

REDUCES = ("reduce_scatter", "all_reduce")


def collective(job: Job, point: CollectivePoint) -> Callable[[], object]:
    """Runs the collective of a point over this rank's group on its axis, or axes; all ranks must call it.

    Its ``size_bytes`` is the larger buffer: of an all-gather the gathered one, else what each rank holds.
    """
    if point.kind == "broadcast":  # plans have none; parameters are agreed on by it
        axis = job.mesh.index(point.axis)
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


def row(job: Job, point: RowPoint) -> Callable[[], object]:
    """Runs kernels in a row, and behind them the collective, if there is one; all ranks must call it."""
    kernels = in_a_row(job, point)
    if point.collective is None:
        return kernels
    behind = collective(job, point.collective)

    def run() -> object:
        kernels()
        return behind()

    return run


def _sent(job: Job, point: CollectivePoint) -> tuple[GraphEmitter, fx.Node, torch.Tensor]:
    """A graph in which the collective of a point is on its way, the node that issued it, and what it is called with."""
    axes = job.mesh.indices(point.axis)
    count = point.size_bytes // ITEM_BYTES // (job.mesh.parts(axes) if point.kind == "all_gather" else 1)
    emitter = GraphEmitter(job.mesh, job.groups)
    x = emitter.placeholder("x", torch.empty(count, dtype=torch.float32, device="meta"), "x")
    sent = emitter.issue(cast(CollectiveKind, point.kind), x, axes, "sum" if point.kind in REDUCES else "")
    return emitter, sent, torch.ones(count, dtype=torch.float32, device=job.device)
