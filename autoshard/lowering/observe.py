"""What a rank really communicates, and what it really holds in memory, intercepted while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .adapter import COLLECTIVES, StorageWatch, links_of, watch
from .match import mesh_of


@dataclass
class CollectiveLog:
    """``records`` holds (kind, mesh axis or axes, bytes of the larger buffer) of each collective, as they ran.

    A collective that autoshard never plans appears under torch's name for it, with its group's name if that is no axis.
    """

    records: list[tuple[str, str, int]] = field(default_factory=list)


@contextmanager
def measure_collectives(mesh: DeviceMesh) -> Iterator[CollectiveLog]:
    """Intercepts every functional collective of this rank, forward and backward, at dispatch; reads no plan."""
    mesh_of(mesh)  # its axes have names
    seen: list[tuple[Any, tuple[Any, ...], Any]] = []
    log = CollectiveLog()
    try:
        with watch(seen):
            yield log
    finally:
        axes = links_of(mesh)
        log.records.extend(_record(op, args, result, axes) for op, args, result in seen)


def _record(op: Any, args: tuple[Any, ...], result: Any, axes: dict[str, str]) -> tuple[str, str, int]:
    tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
    group = next((arg for arg in reversed(args) if isinstance(arg, str)), "")
    size = max((t.numel() * t.element_size() for t in tensors), default=0)
    return COLLECTIVES.get(op, str(op)), axes.get(group, group), size


@dataclass
class MemoryLog:
    """``peak_bytes`` is the most that was in use while some operator ran, and ``peak_operator`` that operator."""

    held_bytes: int = 0
    peak_bytes: int = 0
    peak_operator: str = ""


@contextmanager
def measure_memory(*held: torch.Tensor) -> Iterator[MemoryLog]:
    """Follows every storage that this rank makes: how much is in use, and when it is most.

    Args:
        held: tensors that are there already and count from the beginning (parameters, gradients, the optimizer's state,
            inputs); a DTensor stands for its local shard.

    Yields:
        A log; ``held_bytes`` at once, the rest when the block ends. Storages are seen at dispatch: what a kernel
        allocates within itself is not. On CUDA the figures are those of torch's allocator, and ``held`` is not read.
    """
    log = MemoryLog()
    if torch.cuda.is_available() and any(tensor.is_cuda for tensor in held):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        log.held_bytes = torch.cuda.memory_allocated()
        yield log
        torch.cuda.synchronize()
        log.peak_bytes, log.peak_operator = torch.cuda.max_memory_allocated(), ""
        return
    with StorageWatch(held) as seen:
        log.held_bytes = seen.used_bytes
        try:
            yield log
        finally:
            log.peak_bytes, log.peak_operator = seen.peak_bytes, seen.peak_operator
