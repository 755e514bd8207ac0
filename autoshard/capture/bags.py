"""``nn.EmbeddingBag`` with bags of one length: rows are looked up and added up, so that the batch can be cut.

torch's own operator finds out where bags start by numbers in a tensor, of which no part tells where other bags start.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: None = None,
    max_norm: None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """What ``F.embedding_bag``, whose arguments these are, gives for an input of shape (bags, length)."""
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


_OTHERS = ("offsets", "max_norm", "scale_grad_by_freq", "sparse")


def has_one_length(*args: Any, **kwargs: Any) -> bool:
    """Whether a call of ``F.embedding_bag`` is one that :func:`embedding_bag` can stand for."""
    given = inspect.signature(embedding_bag).bind(*args, **kwargs).arguments
    return all(given.get(name) is None or given[name] is False for name in _OTHERS)
