"""A tensor whose numbers stand in the forward, as one operator: ``torch.tensor([1.0, 2.0])``, ``h[..., 0] = 3``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.types import Number

from .library import define

LARGEST = 1 << 14
"""Elements of the largest tensor that becomes part of a graph; a larger one is a table, which belongs in a buffer."""


def _constant(values: Sequence[Number], size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The tensor of a shape with these elements in row-major order."""
    return torch.tensor(list(values), dtype=dtype, device=device).reshape(size)


def _constant_shape(
    values: Sequence[Number], size: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


constant = define("constant", _constant, _constant_shape)


def constant_arguments(tensor: torch.Tensor) -> tuple[tuple[object, ...], tuple[tuple[str, object], ...]]:
    """The arguments, and those by name, with which :data:`constant` makes a tensor again on the CPU."""
    values = tuple(tensor.detach().flatten().tolist())
    return (values, tuple(tensor.shape)), (("device", torch.device("cpu")), ("dtype", tensor.dtype))
