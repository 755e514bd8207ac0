"""Sums over all alignments of a sequence of targets with a sequence of steps (:mod:`autoshard.capture.operators.ctc`):
rows of the batch by themselves.
"""

from __future__ import annotations

from typing import Any

import torch

from ..capture import Node
from ..layout import P_SUM, R, S
from .operator import Metas, Operator, enter
from .rule import Rule


def _rows(node: Node, inputs: Metas) -> list[Rule]:
    """The batch: dim 1 of log-probabilities, (T, N, C), dim 0 of all else."""
    return [Rule((S(1), S(0), S(0), S(0)), (S(0), S(0)))]


def _rows_backward(node: Node, inputs: Metas) -> list[Rule]:
    """The batch; and addends of the gradient, in which it is linear."""
    return [
        Rule((S(0), S(1), S(0), S(0), S(0), S(0), S(0)), (S(1),)),
        Rule((P_SUM, R, R, R, R, R, R), (P_SUM,)),
    ]


def _small(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    """The table is as long as the targets are, and the blank is one of the classes."""
    first = len(inputs) // 7  # in the backward the gradient is the first tensor
    if first:
        shapes[-1][2] = 2 * shapes[first + 1][1] + 1
    *tensors, blank, zero_infinity = node.args
    return (*tensors, min(blank, shapes[first][2] - 1), zero_infinity)


def _meant(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Classes but for the blank, and lengths that there are."""
    first = len(values) // 7
    log_probs, targets, steps, lengths = values[first : first + 4]
    blank, most = node.args[-2], min(targets.shape[1], log_probs.shape[0] // 2)
    targets = targets.remainder(max(1, log_probs.shape[2] - 1))
    targets = targets + (targets >= blank).long()
    steps, lengths = log_probs.shape[0] - steps.remainder(2), lengths.remainder(most + 1)
    return (*values[:first], log_probs, targets, steps, lengths, *values[first + 4 :])


enter("ctc", Operator(rules=_rows, small=_small, meant=_meant, kernel="softmax"), namespace="autoshard")
enter(
    "ctc_backward", Operator(rules=_rows_backward, small=_small, meant=_meant, kernel="softmax"), namespace="autoshard"
)
