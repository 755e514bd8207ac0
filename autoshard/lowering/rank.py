"""Who runs a local program."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rank:
    """One rank of a job: its coordinate on the mesh, its device, and the name of its process group along each axis."""

    coordinate: tuple[int, ...]
    device: torch.device
    groups: tuple[str, ...]
