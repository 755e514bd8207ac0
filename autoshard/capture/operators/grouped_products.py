"""Products in groups of rows, the rows in any order: each row meets the matrix of its group, as a token its expert.

``autoshard::grouped_product`` sorts the rows by their groups, multiplies each group with its matrix, and puts the rows
back. So what it makes of a row depends on no other row, and the rows can be cut; where the groups are cut, a rank does
the rows of its groups, and zeros stand for the others. ``autoshard::grouped_outer`` is the gradient of the matrices.

Shapes: S rows, G groups, K and N features. ``group`` (S) has numbers from 0 to G - 1; a row of any other is zeros.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import define, derive

_BYTES = 16
"""What torch's kernel wants the rows of matrices to be a multiple of."""


def _grouped_product(x: Tensor, group: Tensor, weight: Tensor, groups: int) -> Tensor:
    """``x[s] @ weight[group[s]]`` of each row s: (S, K), (S), (G, K, N) and G make (S, N).

    Where ``weight`` has fewer matrices than ``groups``, it is a block of them, and ``group`` counts from its first;
    what it has beyond are other rows.
    """
    order, ends = _sorted(group, len(weight))
    rows = x[order]
    if _has_kernel(rows, weight):
        found = F.grouped_mm(rows, weight, offs=ends)
        if len(weight) < groups:
            found = found.masked_fill(torch.arange(len(x), device=x.device).unsqueeze(-1) >= ends[-1], 0)
    else:
        found = rows.new_zeros((len(rows), weight.shape[2]))
        for k, (start, stop) in enumerate(_ranges(ends)):
            if start < stop:
                torch.mm(rows[start:stop], weight[k], out=found[start:stop])
    return torch.empty_like(found).index_copy_(0, order, found)


def _grouped_product_shape(x: Tensor, group: Tensor, weight: Tensor, groups: int) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))


def _grouped_outer(x: Tensor, y: Tensor, group: Tensor, groups: int) -> Tensor:
    """The sum of ``x[s]^T y[s]`` over the rows s of each group: (S, K), (S, N), (S) and G make (G, K, N)."""
    order, ends = _sorted(group, groups)
    x, y = x[order], y[order]
    if _has_kernel(x, y):
        return F.grouped_mm(x.mT, y, offs=ends)
    found = x.new_zeros((groups, x.shape[1], y.shape[1]))
    for k, (start, stop) in enumerate(_ranges(ends)):
        if start < stop:
            torch.mm(x[start:stop].mT, y[start:stop], out=found[k])
    return found


def _grouped_outer_shape(x: Tensor, y: Tensor, group: Tensor, groups: int) -> Tensor:
    return x.new_empty((groups, x.shape[1], y.shape[1]))


def fake_grouped_mm(
    mode: object, op: object, x: Tensor, y: Tensor, ends: Tensor | None = None, bias: Any = None, dtype: Any = None
) -> Any:
    """What ``F.grouped_mm`` makes of tensors without memory of other dtypes than bfloat16, which torch computes, but
    whose shapes it refuses to say: (S, K) and (G, K, N) make (S, N), (K, S) and (S, N) make (G, K, N), and so on.
    """
    if x.dtype is torch.bfloat16 or x.dtype is not y.dtype or x.dtype not in (torch.float32, torch.float16):
        return NotImplemented
    groups = () if ends is None or x.dim() != y.dim() else (len(ends),)
    if x.dim() == y.dim() == 3:
        groups = (x.shape[0],)
    return x.new_empty((*groups, x.shape[-2], y.shape[-1]), dtype=dtype or x.dtype)


grouped_product = define("grouped_product", _grouped_product, _grouped_product_shape)
grouped_outer = define("grouped_outer", _grouped_outer, _grouped_outer_shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, group, weight, ctx.groups = inputs
    ctx.save_for_backward(x, group, weight)


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, group, weight = ctx.saved_tensors
    of_rows = grouped_product(gradient, group, weight.transpose(1, 2), ctx.groups)
    return of_rows, None, grouped_outer(x, gradient, group, len(weight)), None


derive("grouped_product", _back, _keep)


def _sorted(group: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """The rows by their groups, those of no group last, and where the rows of each group end."""
    is_known = (group >= 0) & (group < groups)
    in_order, order = torch.sort(group.where(is_known, groups), stable=True)
    numbers = torch.arange(groups, dtype=in_order.dtype, device=group.device)
    return order, torch.searchsorted(in_order, numbers, right=True, out_int32=True)


def _ranges(ends: Tensor) -> list[tuple[int, int]]:
    """Where the rows of each group start and end; a GPU is waited for."""
    stops: list[int] = ends.tolist()
    return list(zip([0, *stops], stops))


def _has_kernel(x: Tensor, y: Tensor) -> bool:
    """Whether torch has a kernel for the groups together: in 16 bits, with rows of a length that it can read."""
    if x.dtype is not torch.bfloat16:
        return False
    return all(
        size * each.element_size() % _BYTES == 0
        for each in (x, y)
        for size in each.shape[-2 if each.dim() == 3 else -1 :]
    )
