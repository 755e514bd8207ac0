"""Small lengths for the check of a rule, in the order of the real ones and cut alike."""

from __future__ import annotations

import torch

from ..layout import block

SMALLEST = 2
"""Lengths and integers up to this one stay as they are: these may be modes."""


def small_lengths(sizes: set[int], carried: set[int], parts: int, ranks: int) -> dict[int, int]:
    """The small number for every length of a dim and every integer that an argument carries, in the same order."""
    result, last = {size: size for size in sizes | carried if size <= SMALLEST}, SMALLEST
    for size in sorted(size for size in sizes | carried if size > SMALLEST):
        last += 1
        while size in sizes and not _is_cut_alike(size, parts, last, ranks):
            last += 1
        result[size] = last
    return result


def _is_cut_alike(size: int, parts: int, candidate: int, ranks: int) -> bool:
    """Divisible or not, no rank without an index, and one index per rank only where the real one has that."""
    even = size % parts == 0
    if (candidate % ranks == 0) != even or block(candidate, ranks, ranks - 1)[0] == candidate:
        return False
    return not even or candidate > ranks or size == parts


def wide(dtype: torch.dtype) -> torch.dtype:
    """Double precision."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype
