"""The loss of connectionist temporal classification with a table whose shape no numbers decide.

torch's operator keeps a table as long as the longest target of the batch is. ``autoshard::ctc`` keeps one as long as
the padded targets are, so that shapes are known before a step, and a rank with some rows of the batch has a table of
these. A. Graves et al., "Connectionist Temporal Classification", ICML 2006, section 4.1: the table is alpha.

Shapes: T steps, N rows, C classes, S places for targets. ``targets`` (N, S): beyond the length of a row any class.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import define, derive

aten = torch.ops.aten


def _ctc(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """The loss of each row, (T, N, C), (N, S), (N) and (N) make (N); infinite where no alignment is. And the logarithms
    of alpha, (N, T, 2 S + 1), zero where torch writes nothing. ``zero_infinity`` is for the gradient alone.
    """
    loss, table = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, False)
    is_beyond = _numbers(table.shape[1], table) >= input_lengths.unsqueeze(1)
    is_unread = is_beyond.unsqueeze(2) | (_numbers(table.shape[2], table) > 2 * target_lengths.unsqueeze(1)).unsqueeze(
        1
    )
    return loss, F.pad(table.masked_fill_(is_unread, 0.0), (0, _width(targets) - table.shape[2]))


def _ctc_shape(log_probs: Tensor, targets: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _check_dtype(log_probs)
    steps, rows = log_probs.shape[:2]
    return log_probs.new_empty((rows,)), log_probs.new_empty((rows, steps, _width(targets)))


def _ctc_backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    table: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of ``log_probs`` from that of the loss of each row. Where that is infinite it is zeros if
    ``zero_infinity``, and no numbers otherwise.
    """
    given = (log_probs, targets, input_lengths, target_lengths, loss, table)
    found: Tensor = aten._ctc_loss_backward.Tensor(gradient, *given, blank, zero_infinity)
    return found


def _ctc_backward_shape(gradient: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def fake_ctc_loss(mode: object, op: object, log_probs: Tensor, targets: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    """What torch's operator makes of tensors without memory; it refuses, as the shape of its table is unknown."""
    _check_dtype(log_probs)
    rows = log_probs.shape[1]
    return log_probs.new_empty((rows,)), log_probs.new_empty((rows, log_probs.shape[0], 1))


def _check_dtype(log_probs: Tensor) -> None:
    if log_probs.dtype not in (torch.float32, torch.float64):
        raise RuntimeError(f"ctc_loss takes log-probabilities in float32 or float64, not {log_probs.dtype}")


def _numbers(count: int, beside: Tensor) -> Tensor:
    return torch.arange(count, device=beside.device)


def _width(targets: Tensor) -> int:
    return 2 * targets.shape[1] + 1


ctc = define("ctc", _ctc, _ctc_shape)
ctc_backward = define("ctc_backward", _ctc_backward, _ctc_backward_shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.blank, ctx.zero_infinity = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _back(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return ctc_backward(gradient, *ctx.saved_tensors, ctx.blank, ctx.zero_infinity), *(None,) * 5


derive("ctc", _back, _keep)
