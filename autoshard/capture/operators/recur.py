"""All steps of a recurrent layer in one direction as one operator: ``autoshard::recur``.

A graph does not grow with them. The product with the input, which needs no state, is made of all steps before. What a
step makes beside its state, of which the backward goes, is kept of all steps, as cuDNN does in its reserve space. The
formulas are those of ``torch.nn.LSTM``, ``GRU`` and ``RNN``, and their derivatives.

Shapes: B rows, T steps, H of the state, G gates (4 of an LSTM, 3 of a GRU, 1 of an RNN), P of the output: H, unless it
is projected. A state is (B, P), of an LSTM (B, P + H): output and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import define, derive


@dataclass(frozen=True)
class Cell:
    """One step of a mode.

    Attributes:
        gates: how many it has.
        kept: of how many times H numbers of a row the backward goes; the last are the new memory, where there is one.
        has_memory: whether its state has one.
        step: of the gates of the input (B, G * H), those of the state before, and that state, output and memory: the
            output before it is projected, the new memory, and what is kept.
        back: of the gradients of that output and memory, of what is kept, and of the state before: the gradients of the
            gates, of the memory before, and of the output before where it is no gate that takes it.
    """

    gates: int
    kept: int
    has_memory: bool
    step: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    back: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor | None]]


def _lstm(gates: Tensor, of_state: Tensor, output: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    enter, keep, new, leave = (gates + of_state).chunk(4, -1)
    enter, keep, new, leave = enter.sigmoid(), keep.sigmoid(), new.tanh(), leave.sigmoid()
    memory = keep * memory + enter * new
    return leave * memory.tanh(), memory, torch.cat((enter, keep, new, leave, memory), -1)


def _lstm_back(
    output_grad: Tensor, memory_grad: Tensor, kept: Tensor, output: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, None]:
    enter, keep, new, leave, after = kept.chunk(5, -1)
    shown = after.tanh()
    memory_grad = memory_grad + output_grad * leave * (1 - shown * shown)
    of_enter = memory_grad * new * enter * (1 - enter)
    of_keep = memory_grad * memory * keep * (1 - keep)
    of_new = memory_grad * enter * (1 - new * new)
    of_leave = output_grad * shown * leave * (1 - leave)
    return torch.cat((of_enter, of_keep, of_new, of_leave), -1), memory_grad * keep, None


def _gru(gates: Tensor, of_state: Tensor, output: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (reset, keep, new), (state_reset, state_keep, state_new) = gates.chunk(3, -1), of_state.chunk(3, -1)
    reset, keep = (reset + state_reset).sigmoid(), (keep + state_keep).sigmoid()
    new = (new + reset * state_new).tanh()
    return new + keep * (output - new), memory, torch.cat((reset, keep, new, state_new), -1)


def _gru_back(
    output_grad: Tensor, memory_grad: Tensor, kept: Tensor, output: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    reset, keep, new, state_new = kept.chunk(4, -1)
    of_new = output_grad * (1 - keep) * (1 - new * new)
    of_reset = of_new * state_new * reset * (1 - reset)
    of_keep = output_grad * (output - new) * keep * (1 - keep)
    return torch.cat((of_reset, of_keep, of_new), -1), memory_grad, output_grad * keep


def _tanh(gates: Tensor, of_state: Tensor, output: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    made = (gates + of_state).tanh()
    return made, memory, made


def _tanh_back(
    output_grad: Tensor, memory_grad: Tensor, kept: Tensor, output: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, None]:
    return output_grad * (1 - kept * kept), memory_grad, None


def _relu(gates: Tensor, of_state: Tensor, output: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    made = (gates + of_state).relu()
    return made, memory, made


def _relu_back(
    output_grad: Tensor, memory_grad: Tensor, kept: Tensor, output: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor, None]:
    return output_grad * (kept > 0), memory_grad, None


CELLS = {
    "LSTM": Cell(4, 5, True, _lstm, _lstm_back),
    "GRU": Cell(3, 4, False, _gru, _gru_back),
    "RNN_TANH": Cell(1, 1, False, _tanh, _tanh_back),
    "RNN_RELU": Cell(1, 1, False, _relu, _relu_back),
}
"""By the modes of ``nn.RNNBase``."""


def _recur(
    gates: Tensor,
    start: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    within: Tensor | None,
    mode: str,
    is_reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The outputs (B, T, P), the last state and what is kept (B, T, K), of the gates of the input (B, T, G * H), the
    first state, weight (G * H, P), bias (G * H) and projection (P, H). Of rows that are not ``within`` a step, (B, T),
    the output is zero, and the state stays.
    """
    cell, width = CELLS[mode], weight.shape[1]
    outputs, last, kept = _recur_shapes(gates, start, weight, mode, is_reverse)
    state = start
    for k in _order(gates.shape[1], is_reverse):
        output, memory = state[:, :width], state[:, width:]
        made, memory, kept[:, k] = cell.step(gates[:, k], F.linear(output, weight, bias), output, memory)
        made = made if projection is None else F.linear(made, projection)
        new = torch.cat((made, memory), -1) if cell.has_memory else made
        if within is None:
            outputs[:, k], state = made, new
        else:
            has = within[:, k, None]
            outputs[:, k], state = torch.where(has, made, 0.0), torch.where(has, new, state)
    return outputs, last.copy_(state), kept


def _recur_shapes(gates: Tensor, start: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    (rows, steps), cell = gates.shape[:2], CELLS[others[-2]]
    kept = cell.kept * (weight.shape[0] // cell.gates)
    outputs = gates.new_empty((rows, steps, weight.shape[1]))
    return outputs, start.new_empty(start.shape), gates.new_empty((rows, steps, kept))


def _recur_backward(
    outputs_grad: Tensor,
    last_grad: Tensor,
    start: Tensor,
    weight: Tensor,
    projection: Tensor | None,
    within: Tensor | None,
    outputs: Tensor,
    kept: Tensor,
    mode: str,
    is_reverse: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of the gates of the input and of the first state, of those of the outputs and of the last state;
    behind the former, where outputs are projected, what comes back to them: (B, T, G * H + P).
    """
    cell, width = CELLS[mode], weight.shape[1]
    (found, first_grad), grad = _recur_backward_shapes(outputs_grad, last_grad, start, weight, projection), last_grad
    size = weight.shape[0] // cell.gates if cell.has_memory else 0
    order = _order(outputs.shape[1], is_reverse)
    for place, k in reversed(list(enumerate(order))):
        if place:
            j = order[place - 1]
            state_before = torch.cat((outputs[:, j], kept[:, j, kept.shape[2] - size :]), -1)
            if within is not None:  # the first step of a row has the start before it
                state_before = torch.where(within[:, j, None], state_before, start)
        else:
            state_before = start
        back = grad[:, :width] + outputs_grad[:, k]
        made = back if projection is None else back @ projection
        output, memory = state_before[:, :width], state_before[:, width:]
        of_gates, of_memory, of_output = cell.back(made, grad[:, width:], kept[:, k], output, memory)
        of_state = _of_state(mode, of_gates, kept[:, k]) @ weight
        of_state = of_state if of_output is None else of_state + of_output
        new = torch.cat((of_state, of_memory), -1) if cell.has_memory else of_state
        of_all = of_gates if projection is None else torch.cat((of_gates, back), -1)
        if within is not None:
            has = within[:, k, None]
            of_all, new = torch.where(has, of_all, 0.0), torch.where(has, new, grad)
        found[:, k], grad = of_all, new
    return found, first_grad.copy_(grad)


def _recur_backward_shapes(
    outputs_grad: Tensor, last_grad: Tensor, start: Tensor, weight: Tensor, projection: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor]:
    width = weight.shape[0] + (0 if projection is None else weight.shape[1])
    return outputs_grad.new_empty((*outputs_grad.shape[:2], width)), start.new_empty(start.shape)


def _order(steps: int, is_reverse: bool) -> range:
    return range(steps)[::-1] if is_reverse else range(steps)


def _before(each: Tensor, start: Tensor, within: Tensor | None, is_reverse: bool) -> Tensor:
    """What each step has of the one before, (B, T, ...), of what each step makes and of the start; of rows that are not
    within the step before the start, as theirs is the first.
    """
    first, steps = start.unsqueeze(1), each.shape[1]
    if within is not None:
        each = torch.where(within.unsqueeze(-1), each, first)
    if is_reverse:
        return torch.cat((each[:, 1:], first[:, :steps]), 1)
    return torch.cat((first[:, :steps], each[:, : max(0, steps - 1)]), 1)


def _of_state(mode: str, of_gates: Tensor, kept: Tensor) -> Tensor:
    """The gradients of the gates of the state before, of those of the input: a GRU's state is reset in one of them."""
    if mode != "GRU":
        return of_gates
    reset, _, _, _ = kept.chunk(4, -1)
    of_reset, of_keep, of_new = of_gates.chunk(3, -1)
    return torch.cat((of_reset, of_keep, of_new * reset), -1)


recur = define("recur", _recur, _recur_shapes)
recur_backward = define("recur_backward", _recur_backward, _recur_backward_shapes)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, start, weight, bias, projection, within, ctx.mode, ctx.is_reverse = inputs
    outputs, _, kept = output
    ctx.save_for_backward(start, weight, bias, projection, within, outputs, kept)
    ctx.mark_non_differentiable(kept)


def _back(ctx: Any, outputs_grad: Tensor, last_grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    start, weight, bias, projection, within, outputs, kept = ctx.saved_tensors
    found, of_start = recur_backward(
        outputs_grad, last_grad, start, weight, projection, within, outputs, kept, ctx.mode, ctx.is_reverse
    )
    of_gates = found if projection is None else found[..., : weight.shape[0]]
    of_state = _of_state(ctx.mode, of_gates, kept)
    before = _before(outputs, start[:, : weight.shape[1]], within, ctx.is_reverse)
    of_weight = of_state.flatten(0, 1).t() @ before.flatten(0, 1)
    of_bias = None if bias is None else of_state.sum((0, 1))
    of_projection = None
    if projection is not None:
        _, _, _, leave, memory = kept.chunk(5, -1)
        of_projection = found[..., weight.shape[0] :].flatten(0, 1).t() @ (leave * memory.tanh()).flatten(0, 1)
    return of_gates, of_start, of_weight, of_bias, of_projection, None, None, None


derive("recur", _back, _keep)
