"""What torch does with a look at the numbers of a tensor, to refuse or to recognise some of them, without that look."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from .masks import written_by


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """What ``F.gaussian_nll_loss``, whose arguments and defaults these are, gives for variances that are not negative.

    Raises:
        ValueError: a variance that is a number is negative; variances are not of the input's shape, nor without its
            last dim or of length 1 along one; or the reduction is unknown.
    """
    if isinstance(var, float):
        if var < 0:
            raise ValueError("var has negative entry/entries")
        var = torch.full_like(input, var)
    elif var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    repeated = [k for k, (length, whole) in enumerate(zip(var.shape, input.shape)) if length != whole]
    if var.dim() != input.dim() or len(repeated) > 1 or any(var.shape[k] != 1 for k in repeated):
        raise ValueError("var is of incorrect size")
    with torch.no_grad():
        least = var.clamp(min=eps) - var
    var = var + least  # torch's gradient passes through the clamp
    loss = 0.5 * (var.log() + (input - target) ** 2 / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def leave_checks_out(graph: fx.Graph) -> None:
    """Erases the checks of numbers in a traced forward (``torch._check_tensor_all``), and what is made for these alone:
    none decides what the graph computes, and a graph raises no error of the model's.
    """
    read: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        is_read_by_checks = node in read and not node.users and node.op not in ("placeholder", "get_attr")
        is_read_by_checks = is_read_by_checks and not written_by(node)
        if node.target is torch.ops.aten._assert_scalar.default or is_read_by_checks:
            read.update(node.all_input_nodes)
            graph.erase_node(node)


def is_said_to_be_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """In the place of ``torch.nn.modules.transformer._detect_is_causal_mask``, which compares a mask with the causal
    one where nothing is said of it: any mask is taken for what it is.
    """
    return is_causal is True


def check_tensor_all_with(error_type: type[Exception], cond: Tensor, message: Callable[[], Any] | None = None) -> None:
    """In the place of ``torch._check_tensor_all_with``, which looks whether ``cond`` is true everywhere: nothing."""
