"""Kernels in several passes hold their intermediate numbers of some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_HELD = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Elements of which intermediate numbers are held at a time, by device: a cache's worth, or 64 MiB of float32, as
kernels take time to start.
"""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which many numbers are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def pieces(x: torch.Tensor, dim: int) -> Iterator[tuple[slice, ...]]:
    """Ranges of all that lies along ``dim``, each of at most so many elements as are held at a time, or of one index of
    another dim.
    """
    held = _HELD.get(x.device.type, _HELD["cuda"])
    along = next((d for d in range(x.dim()) if d != dim % max(1, x.dim()) and x.shape[d] > 1), None)
    if along is None or x.numel() <= held:
        yield (slice(None),) * x.dim()
        return
    width = max(1, held * x.shape[along] // x.numel())
    for start in range(0, x.shape[along], width):
        yield tuple(slice(start, start + width) if d == along else slice(None) for d in range(x.dim()))
