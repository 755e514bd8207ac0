"""``nn.EmbeddingBag`` as rows that are looked up and added up, so that it can be cut.

With bags of one length the batch can be cut. torch's own operator finds out where bags start by numbers in a tensor,
``offsets``, of which no part tells where other bags start. Where there are offsets, each row is added to its bag: the
rows can be cut, and the columns.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """What ``F.embedding_bag``, whose arguments these are, gives for an input of shape (bags, length), or (rows,) with
    offsets.
    """
    if offsets is not None:
        starts = offsets[:-1] if include_last_offset else offsets
        return _added_to_bags(input, weight, starts, mode, per_sample_weights, padding_idx)
    rows = F.embedding(input, weight, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    is_left_out = None if padding_idx is None else (input == padding_idx % len(weight)).unsqueeze(-1)
    if mode == "max":
        if is_left_out is None:
            return rows.max(1).values
        return rows.masked_fill(is_left_out, float("-inf")).max(1).values.masked_fill(is_left_out.all(1), 0.0)
    if is_left_out is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1)
    total = rows.masked_fill(is_left_out, 0.0).sum(1)
    return total if mode == "sum" else total / (~is_left_out).sum(1).clamp(min=1)


def _added_to_bags(
    input: Tensor, weight: Tensor, starts: Tensor, mode: str, per_sample_weights: Tensor | None, padding_idx: int | None
) -> Tensor:
    """The sum or mean of each bag, shape (bags, columns), of rows (rows,) that are one bag after another: row r is of
    the last bag that starts at r or before. Bags without rows are zero.
    """
    rows = F.embedding(input, weight, padding_idx)
    bag = torch.searchsorted(starts, torch.arange(len(input), device=input.device), right=True) - 1
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    counts = torch.ones_like(rows[:, 0])
    if padding_idx is not None:
        is_left_out = input == padding_idx % len(weight)
        rows, counts = rows.masked_fill(is_left_out.unsqueeze(-1), 0.0), counts.masked_fill(is_left_out, 0.0)
    total = rows.new_zeros(len(starts), weight.shape[1]).index_add(0, bag, rows)
    if mode == "sum":
        return total
    return total / counts.new_zeros(len(starts)).index_add(0, bag, counts).clamp(min=1).unsqueeze(-1)


_OTHERS = ("max_norm", "scale_grad_by_freq", "sparse")


def can_be_added_up(*args: Any, **kwargs: Any) -> bool:
    """Whether a call of ``F.embedding_bag`` is one that :func:`embedding_bag` can stand for."""
    given = inspect.signature(embedding_bag).bind(*args, **kwargs).arguments
    if given.get("offsets") is not None and given.get("mode") == "max":
        return False
    return all(given.get(name) is None or given[name] is False for name in _OTHERS)
