"""``F.ctc_loss`` with padded targets, so that its batch can be cut (:mod:`autoshard.capture.operators.ctc`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..operators.ctc import ctc


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """What ``F.ctc_loss``, whose arguments these are, gives: for (T, N, C) and targets of shape (N, S), or one behind
    another, (K,); or for one row, (T, C).
    """
    is_batch = log_probs.dim() == 3
    log_probs = log_probs if is_batch else log_probs.unsqueeze(1)
    steps, rows = log_probs.shape[:2]
    ends, lengths = (_lengths(each, rows, log_probs) for each in (input_lengths, target_lengths))
    if targets.dim() == 1:
        most = len(targets) if isinstance(target_lengths, Tensor) else max(target_lengths, default=0)
        # a target that is longer than there are steps has no alignment, however long it is
        lengths, targets = lengths.clamp(max=steps + 1), _padded(targets, lengths, min(most, steps + 1))
    loss: Tensor = ctc(log_probs, targets.long(), ends, lengths, blank, zero_infinity)[0]
    if zero_infinity:
        loss = loss.masked_fill(loss == torch.inf, 0.0)
    if reduction == "mean":
        return (loss / lengths.clamp(min=1)).mean()
    if reduction == "sum":
        return loss.sum()
    return loss if is_batch else loss.squeeze(0)


def _lengths(given: Tensor | Sequence[int], rows: int, beside: Tensor) -> Tensor:
    lengths = given if isinstance(given, Tensor) else torch.tensor(given, device=beside.device)
    return lengths.to(beside.device, torch.int64).reshape(rows)


def _padded(targets: Tensor, lengths: Tensor, most: int) -> Tensor:
    """Targets that lie one behind another, (K,), as (N, most)."""
    starts = lengths.cumsum(0) - lengths
    places = starts.unsqueeze(1) + torch.arange(most, device=targets.device)
    return targets[places.clamp(max=max(len(targets) - 1, 0))] if len(targets) else targets.new_zeros(places.shape)
