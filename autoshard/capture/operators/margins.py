"""``F.multilabel_margin_loss`` in elementary operators: the decomposition that torch captures (torch/_decomp/
decompositions.py, 2.11 to 2.13) counts places behind the first -1 as targets of class 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def multilabel_margin_loss(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """What ``F.multilabel_margin_loss``, whose arguments and defaults these are, computes (docs.pytorch.org, nn.
    MultiLabelMarginLoss): the mean over classes of ``max(0, 1 - (x[y] - x[i]))`` over all targets y, up to the first
    -1, and all other classes i.

    Args:
        input: (N, C) or (C,).
        target: classes, of the same shape.

    Raises:
        ValueError: the shapes differ, or the reduction is unknown.
    """
    if reduce is not None or size_average is not None:
        reduction = "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if input.shape != target.shape or not 1 <= input.dim() <= 2 or not input.shape[-1]:
        raise ValueError(f"inconsistent target size: {tuple(target.shape)} for input of size: {tuple(input.shape)}")
    scores, targets = torch.atleast_2d(input, target)
    classes = torch.arange(scores.shape[1], device=scores.device)
    end = torch.where(targets == -1, classes, scores.shape[1]).amin(-1, keepdim=True)
    counts = classes < end
    labels = torch.where(counts, targets, 0)
    is_target = ((labels[:, :, None] == classes) & counts[:, :, None]).any(1)
    margins = (1 - scores.gather(1, labels)[:, :, None] + scores[:, None, :]).clamp_min(0)
    counted = counts[:, :, None] & ~is_target[:, None, :]
    losses: Tensor = torch.where(counted, margins, 0.0).sum((1, 2)) / scores.shape[1]
    if reduction == "none":
        return losses if input.dim() == 2 else losses[0]
    return losses.sum() if reduction == "sum" else losses.mean()
