"""Products of matrices with several dims in front, attention that is written out, as one operator.

Torch computes ``q @ k.transpose(-2, -1)`` of (B, H, T, D) as one batch of B * H products. Of that dim no block is some
heads of several rows, so that attention could be cut along its batch alone. ``autoshard::matmul`` keeps the dims in
front, and each of them can be cut. It calls the kernel that torch calls, with the copies that torch makes for it.

Shapes: x is (..., M, K), y is (..., K, N), with two or more dims in front that are the same.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from .library import define, derive

LEAST = 4
"""With fewer dims a product is a batch of products as it is."""


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    """The product of each pair of matrices."""
    return torch.matmul(x, y)


def _matmul_shape(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], y.shape[-1]))


matmul = define("matmul", _matmul, _matmul_shape)


def product(x: Tensor, y: Tensor) -> Tensor:
    """``x @ y``; under autocast torch's own, which knows what to cast."""
    if torch.is_autocast_enabled(x.device.type):
        return x @ y
    found: Tensor = matmul(_as_a_batch(x), _as_a_batch(y))
    return found


def _as_a_batch(x: Tensor) -> Tensor:
    """A copy where the dims in front are no single dim in memory: torch's kernel takes one."""
    front = range(x.dim() - 3)
    return x if all(x.stride(d) == x.shape[d + 1] * x.stride(d + 1) for d in front) else x.contiguous()


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, y = ctx.saved_tensors
    of_x, of_y = ctx.needs_input_grad
    grad = _as_a_batch(grad)
    return product(grad, y.mT) if of_x else None, product(x.mT, grad) if of_y else None


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


derive("matmul", _backward, _keep)


def is_product(node: fx.Node) -> bool:
    """Whether a node multiplies matrices of real numbers that have the same dims in front, two or more."""
    if node.target not in (operator.matmul, torch.matmul, "matmul") or len(node.args) != 2 or node.kwargs:
        return False
    x, y = (arg.meta.get("example_value") if isinstance(arg, fx.Node) else None for arg in node.args)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.dtype != y.dtype or x.is_complex():
        return False
    return x.dim() == y.dim() >= LEAST and x.shape[:-2] == y.shape[:-2]
