"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` taken apart, step by step.

torch's capture does the same, but multiplies the steps of all rows in one product of ``(steps * rows, features)``, of
which no block is the steps of some rows. Here that product is of ``(rows * steps, features)``, so the batch can be cut.

Shapes: B rows, T steps, I features of the input, H of the state, G gates (4 of an LSTM, 3 of a GRU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..by_numbers.packed import is_within

State = tuple[Tensor, ...]
"""What one row carries from step to step, its output first: (B, H) each."""
Cell = Callable[[Tensor, State, Sequence[Tensor]], State]
"""One step: of the gates of the input (B, G * H), the state before, and the weights that it meets."""


def _recurrent(
    cell: Cell,
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
    within = None if lengths is None else _steps_within(x, lengths)
    last: list[State] = []
    for layer in range(layers):
        outputs = []
        for k in range(layer * directions, (layer + 1) * directions):
            mine, before = weights[k * count : (k + 1) * count], tuple(state[k] for state in states)
            output, after = _one_direction(cell, x, before, mine, has_biases, within, is_reverse=k % directions == 1)
            outputs.append(output)
            last.append(after)
        x = torch.cat(outputs, -1) if is_bidirectional else outputs[0]
        if dropout and is_training and layer < layers - 1:
            x = F.dropout(x.transpose(0, 1).contiguous(), dropout).transpose(0, 1)  # drawn step by step, as torch does
    return (x if is_batch_first else x.transpose(0, 1), *(torch.stack(parts) for parts in zip(*last)))


def _steps_within(x: Tensor, lengths: Tensor) -> Sequence[Tensor]:
    """Of each step, which rows have it, (B, 1)."""
    return is_within(x, lengths).unsqueeze(-1).unbind(1)


def _one_direction(
    cell: Cell,
    x: Tensor,
    state: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    within: Sequence[Tensor] | None,
    is_reverse: bool,
) -> tuple[Tensor, State]:
    """The outputs (B, T, H) of x (B, T, I), and the last state. Of rows that are not ``within`` a step the output is
    zero, and the state stays.
    """
    bias, others = (weights[2], (weights[1], *weights[3:])) if has_biases else (None, (weights[1], None, *weights[2:]))
    steps = F.linear(x, weights[0], bias).unbind(1)
    outputs = []
    for k in reversed(range(len(steps))) if is_reverse else range(len(steps)):
        made = cell(steps[k], state, others)  # type: ignore[arg-type]
        outputs.append(made[0] if within is None else torch.where(within[k], made[0], 0.0))
        state = made if within is None else tuple(torch.where(within[k], new, old) for new, old in zip(made, state))
    return torch.stack(outputs[::-1] if is_reverse else outputs, 1), state


def _lstm(gates: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    weight, bias, *projection = weights
    enter, keep, new, leave = (gates + F.linear(state[0], weight, bias)).chunk(4, -1)
    memory = keep.sigmoid() * state[1] + enter.sigmoid() * new.tanh()
    output = leave.sigmoid() * memory.tanh()
    return (F.linear(output, projection[0]) if projection else output), memory


def _gru(gates: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    reset, keep, new = gates.chunk(3, -1)
    state_reset, state_keep, state_new = F.linear(state[0], *weights).chunk(3, -1)
    candidate = (new + (reset + state_reset).sigmoid() * state_new).tanh()
    return (candidate + (keep + state_keep).sigmoid() * (state[0] - candidate),)


def _simple(activation: Callable[[Tensor], Tensor], gates: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    return (activation(gates + F.linear(state[0], *weights)),)


def _run_lstm(*args: Any) -> tuple[Tensor, ...]:
    return _recurrent(_lstm, *args)


def _run_gru(*args: Any) -> tuple[Tensor, ...]:
    return _recurrent(_gru, *args)


def _run_tanh(*args: Any) -> tuple[Tensor, ...]:
    return _recurrent(partial(_simple, torch.tanh), *args)


def _run_relu(*args: Any) -> tuple[Tensor, ...]:
    return _recurrent(partial(_simple, torch.relu), *args)


STEP_BY_STEP: dict[Any, Callable[..., Any]] = {
    torch.lstm: _run_lstm,
    torch.gru: _run_gru,
    torch.rnn_tanh: _run_tanh,
    torch.rnn_relu: _run_relu,
}
"""What runs in the place of a function of torch."""
_OF_MODE = {"LSTM": _run_lstm, "GRU": _run_gru, "RNN_TANH": _run_tanh, "RNN_RELU": _run_relu}


def keeping_to_lengths(mode: str, x: Tensor, lengths: Tensor, *others: Any) -> tuple[Tensor, ...]:
    """What :func:`~autoshard.capture.by_numbers.packed.run_to_lengths`, whose arguments these are, stands for."""
    return _OF_MODE[mode](x, *others, True, lengths)
