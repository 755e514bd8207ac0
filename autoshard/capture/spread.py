"""Variances and standard deviations over the batch, from sums that ranks can add up.

Torch takes a variance in one pass over all of its numbers, so that whoever has some of the rows has nothing to give.
Here it is the sum of squared distances from the mean: two sums over the batch. Over other dims torch's own stay,
but for ``std_mean``, which DTensor does not know.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from .examples import tensor_of

_VARIANCES = (torch.var, "var", torch.var_mean)
_DEVIATIONS = (torch.std, "std", torch.std_mean)
_WITH_MEAN = (torch.var_mean, torch.std_mean)
_OPTIONS = {"dim": "dim", "axis": "dim", "unbiased": "unbiased", "correction": "correction"}
_OPTIONS |= {"keepdim": "keepdim", "keepdims": "keepdim"}  # torch takes numpy's names


def take_spread_apart(node: fx.Node) -> bool:
    """Rewrites a call of torch in place if it is a variance or a deviation over dim 0, or ``std_mean``; else False."""
    if node.target not in (*_VARIANCES, *_DEVIATIONS) or not node.args:
        return False
    value = tensor_of(node.args[0])
    if value is None or not value.dim() or value.is_complex() or not _OPTIONS.keys() >= node.kwargs.keys():
        return False
    options: dict[str, Any] = {_OPTIONS[name]: value for name, value in node.kwargs.items()}
    dim, correction, keepdim = _asked(*node.args[1:], **options)
    given = range(value.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    dims = [d % value.dim() for d in given]
    count = math.prod(value.shape[d] for d in dims)
    if (0 not in dims and node.target is not torch.std_mean) or count <= correction:
        return False
    made = (count - correction, keepdim, node.target in _DEVIATIONS, node.target in _WITH_MEAN)
    node.op, node.target, node.args, node.kwargs = "call_function", _spread, (node.args[0], dims, *made), {}
    return True


def _asked(
    *args: Any, dim: Any = None, unbiased: bool = True, correction: float | None = None, keepdim: bool = False
) -> tuple[Any, float, bool]:
    """The dims, the correction and whether dims are kept, of arguments as torch has them: (unbiased), or (dim,
    unbiased, keepdim).
    """
    if args and isinstance(args[0], bool):
        (unbiased,) = args
    elif args:
        dim, unbiased, keepdim = args + (unbiased, keepdim)[len(args) - 1 :]
    return dim, float(unbiased) if correction is None else correction, keepdim


def _spread(
    x: Tensor, dims: list[int], count: float, keepdim: bool, is_root: bool, with_mean: bool
) -> Tensor | tuple[Tensor, Tensor]:
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # as torch adds up
    mean = wide.mean(dims, keepdim=True)
    found = (wide - mean).square().sum(dims, keepdim=keepdim) / count
    if is_root:  # the gradient where all numbers are equal is zero, as torch has it
        is_zero = found == 0
        found = found.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)
    found = found.to(x.dtype)
    return (found, (mean if keepdim else mean.squeeze(dims)).to(x.dtype)) if with_mean else found
