"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``: products with the inputs of all steps, and ``autoshard::recur`` of these.

torch's capture takes every step apart, and multiplies those of all rows in one product of ``(steps * rows, features)``,
of which no block is the steps of some rows. Here that product is of ``(rows * steps, features)``, so the batch can be
cut, and the graph does not grow with the steps.

Shapes: B rows, T steps, I features of the input, H of the state, G gates (4 of an LSTM, 3 of a GRU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..by_numbers.packed import is_within
from ..operators.recur import recur

State = tuple[Tensor, ...]
"""What one row carries from step to step, its output first: (B, H) each."""


def _recurrent(
    mode: str,
    x: Tensor,
    start: Tensor | State,
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    is_training: bool,
    is_bidirectional: bool,
    is_batch_first: bool,
    lengths: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The arguments and results of ``torch.lstm``, ``torch.gru`` and so on; with the lengths (B,) of rows those of
    packed sequences, padded with zeros.
    """
    states = start if isinstance(start, (tuple, list)) else (start,)
    directions = 2 if is_bidirectional else 1
    count = len(weights) // (layers * directions)
    x = x if is_batch_first else x.transpose(0, 1)
    within = None if lengths is None else is_within(x, lengths)
    last: list[State] = []
    for layer in range(layers):
        outputs = []
        for k in range(layer * directions, (layer + 1) * directions):
            mine, before = weights[k * count : (k + 1) * count], tuple(state[k] for state in states)
            output, after = one_direction(mode, x, before, mine, has_biases, within, is_reverse=k % directions == 1)
            outputs.append(output)
            last.append(after)
        x = torch.cat(outputs, -1) if is_bidirectional else outputs[0]
        if dropout and is_training and layer < layers - 1:
            x = F.dropout(x.transpose(0, 1).contiguous(), dropout).transpose(0, 1)  # drawn step by step, as torch does
    return (x if is_batch_first else x.transpose(0, 1), *(torch.stack(parts) for parts in zip(*last)))


def one_direction(
    mode: str,
    x: Tensor,
    state: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    within: Tensor | None,
    is_reverse: bool,
) -> tuple[Tensor, State]:
    """The outputs (B, T, H) of x (B, T, I), and the last state. Of rows that are not ``within`` a step, (B, T), the
    output is zero, and the state stays.
    """
    of_input, of_state, *others = weights
    biases = others[:2] if has_biases else (None, None)
    projection = next(iter(others[2 * has_biases :]), None)
    gates = F.linear(x, of_input, biases[0])
    met = [None if each is None else each.to(gates.dtype) for each in (of_state, biases[1], projection)]  # of autocast
    start = (torch.cat(state, -1) if len(state) > 1 else state[0]).to(gates.dtype)
    outputs, last, _ = recur(gates, start, *met, within, mode, is_reverse)
    return outputs, last.split([each.shape[1] for each in state], -1) if len(state) > 1 else (last,)


def _run_lstm(*args: Any) -> tuple[Tensor, ...]:
    return _recurrent("LSTM", *args)


def _run_gru(*args: Any) -> tuple[Tensor, ...]:
    return _recurrent("GRU", *args)


def _run_tanh(*args: Any) -> tuple[Tensor, ...]:
    return _recurrent("RNN_TANH", *args)


def _run_relu(*args: Any) -> tuple[Tensor, ...]:
    return _recurrent("RNN_RELU", *args)


RECURRENT: dict[Any, Callable[..., Any]] = {
    torch.lstm: _run_lstm,
    torch.gru: _run_gru,
    torch.rnn_tanh: _run_tanh,
    torch.rnn_relu: _run_relu,
}
"""What runs in the place of a function of torch."""


def keeping_to_lengths(mode: str, x: Tensor, lengths: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """What :func:`~autoshard.capture.by_numbers.packed.run_to_lengths`, whose arguments these are, stands for."""
    run: Callable[..., tuple[Tensor, ...]] = _recurrent
    return run(mode, x, *others, True, lengths)
