"""Who runs a local program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rank:
    """One rank of a job: its coordinate on the mesh, its device, and the names of its process groups, by the axis along
    which their ranks differ, or the axes (``dp+tp``).
    """

    coordinate: tuple[int, ...]
    device: torch.device
    groups: Mapping[str, str]
