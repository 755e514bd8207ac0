"""What a rank really communicates, intercepted while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from .adapter import COLLECTIVES, group_names, watch
from .match import mesh_of


@dataclass
class CollectiveLog:
    """``records`` holds (kind, mesh axis, bytes of the larger buffer) of each collective, in the order they ran.

    A collective that autoshard never plans appears under torch's name for it, with its group's name if that is no axis.
    """

    records: list[tuple[str, str, int]] = field(default_factory=list)


@contextmanager
def measure_collectives(mesh: DeviceMesh) -> Iterator[CollectiveLog]:
    """Intercepts every functional collective of this rank, forward and backward, at dispatch; reads no plan."""
    axes = dict(zip(group_names(mesh), mesh_of(mesh).axes))
    seen: list[tuple[Any, tuple[Any, ...], Any]] = []
    log = CollectiveLog()
    try:
        with watch(seen):
            yield log
    finally:
        log.records.extend(_record(op, args, result, axes) for op, args, result in seen)


def _record(op: Any, args: tuple[Any, ...], result: Any, axes: dict[str, str]) -> tuple[str, str, int]:
    tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
    group = next((arg for arg in reversed(args) if isinstance(arg, str)), "")
    size = max((t.numel() * t.element_size() for t in tensors), default=0)
    return COLLECTIVES.get(op, str(op)), axes.get(group, group), size
