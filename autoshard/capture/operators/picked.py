"""The gradient of a loss that picks one number of each row, made in one pass.

torch writes the derivative of ``nll_loss`` as zeros, minus ones put into a copy of these, and the product of that with
the gradients of the rows: seven passes over as many numbers as there are logits, two tensors of which are there at a
time, where most steps need the most memory. Capture writes it as ``autoshard::gather_backward``: zeros, and in each row
one number that is put in its place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from .library import define

aten = torch.ops.aten

_MEAN = 1
"""``at::Reduction::Mean``. Source: aten/src/ATen/core/Reduction.h."""


def _gather_backward(gradient: Tensor, index: Tensor, dim: int, length: int) -> Tensor:
    """Zeros with ``gradient`` at ``index``: of the shape of both, which is 1 along ``dim``, and there ``length``."""
    return gradient.new_zeros(_shape(index, dim, length)).scatter_(dim, index, gradient)


def _shapes(gradient: Tensor, index: Tensor, dim: int, length: int) -> Tensor:
    return gradient.new_empty(_shape(index, dim, length))


def _shape(index: Tensor, dim: int, length: int) -> list[int]:
    shape = list(index.shape)
    shape[dim] = length
    return shape


gather_backward = define("gather_backward", _gather_backward, _shapes)


def of_rows(op: Any) -> Any:
    """A decomposition, for capture, of a derivative of ``nll_loss``: torch's where classes have weights."""
    torchs = get_decompositions([op])[op]

    def decomposed(
        gradient: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignored: int, total: Tensor
    ) -> Any:
        if weight is not None:
            return torchs(gradient, x, target, weight, reduction, ignored, total)
        classes = 0 if x.dim() < 2 else 1
        if reduction == _MEAN:
            gradient = gradient / total
        if 0 < gradient.dim() < x.dim():
            gradient = gradient.unsqueeze(classes)
        target = target.unsqueeze(classes)
        counts = target != ignored
        picked, index = torch.where(counts, -gradient, 0), torch.where(counts, target, 0)
        return gather_backward(picked, index, classes, x.shape[classes])

    return decomposed
