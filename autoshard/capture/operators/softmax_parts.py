"""Log-softmax and logsumexp in parts, so that the dim that they go over can be cut: the vocabulary of a loss.

Capture writes ``aten::_log_softmax`` as three operators, the largest number of each row, the sum of what the row's
exponentials are beside it, and what they make of the row; and its backward as two, the sum of each row of the gradient
and what that makes of it. Where a rank has a block of every row, only the first ones of these travel, a number or two
for a row (M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3). Where rows are whole the last operator is
torch's own and reads none of the others, which do not run. ``aten::logsumexp`` over one dim, which keeps logits near
zero in some losses, is the same two and what they make of a row; its backward is made of operators on single elements.

Shapes: a row is what lies along ``dim``; numbers for rows have length 1 there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..graph import Ref, TensorMeta
from .few_rows import pieces, wide
from .library import define

aten = torch.ops.aten


def _rows(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """The shape of a number for each row."""
    return tuple(1 if shape and d == dim % len(shape) else size for d, size in enumerate(shape))


def _reduced(shape: Sequence[int], dim: int, keepdim: bool) -> tuple[int, ...]:
    rows = _rows(shape, dim)
    return rows if keepdim or not shape else (*rows[: dim % len(shape)], *rows[dim % len(shape) + 1 :])


def _row_max(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The largest number of each row."""
    return torch.amax(x, dim, keepdim=True).contiguous()


def _row_max_shape(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.new_empty(_rows(x.shape, dim))


def _row_sum(x: torch.Tensor, largest: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum of ``exp(x - largest)`` of each row, in float32 (float64 for float64)."""
    found = x.new_empty(_rows(x.shape, dim), dtype=wide(x.dtype))
    for piece in pieces(x, dim):
        beside = x[piece].to(found.dtype) - largest[piece]
        found[piece] = beside.exp_().sum(dim, keepdim=True)
    return found


def _row_sum_shape(x: torch.Tensor, largest: torch.Tensor, dim: int) -> torch.Tensor:
    return x.new_empty(_rows(x.shape, dim), dtype=wide(x.dtype))


def _log_softmax(x: torch.Tensor, largest: torch.Tensor, total: torch.Tensor, dim: int) -> torch.Tensor:
    """``x - largest - log(total)``, in the dtype of ``x``."""
    found = torch.empty_like(x, memory_format=torch.contiguous_format)
    return torch.sub(x, largest + total.log(), out=found)


def _log_softmax_shape(x: torch.Tensor, largest: torch.Tensor, total: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _logsumexp(x: torch.Tensor, largest: torch.Tensor, total: torch.Tensor, dim: int, keepdim: bool) -> torch.Tensor:
    """``largest + log(total)``, in the dtype of ``x``, which is there for its shape: infinite where the largest is."""
    found = torch.where(largest.isinf(), largest, largest + total.log()).to(x.dtype)
    return found if keepdim or not x.ndim else found.squeeze(dim)


def _logsumexp_shape(
    x: torch.Tensor, largest: torch.Tensor, total: torch.Tensor, dim: int, keepdim: bool
) -> torch.Tensor:
    return x.new_empty(_reduced(x.shape, dim, keepdim))


def _row_total(grad: torch.Tensor, dim: int) -> torch.Tensor:
    """The sum of each row, in float32 (float64 for float64)."""
    return grad.sum(dim, keepdim=True, dtype=wide(grad.dtype)).contiguous()


def _row_total_shape(grad: torch.Tensor, dim: int) -> torch.Tensor:
    return grad.new_empty(_rows(grad.shape, dim), dtype=wide(grad.dtype))


def _log_softmax_backward(
    grad: torch.Tensor, result: torch.Tensor, total: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """``grad - exp(result) * total``: the gradient of what log-softmax was taken of, whose dtype it has."""
    found = torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format)
    for piece in pieces(grad, dim):
        share = result[piece].to(total.dtype).exp()
        torch.addcmul(grad[piece].to(total.dtype), share, total[piece], value=-1, out=found[piece])
    return found


def _log_softmax_backward_shape(
    grad: torch.Tensor, result: torch.Tensor, total: torch.Tensor, dim: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty_like(grad, dtype=dtype, memory_format=torch.contiguous_format)


row_max = define("row_max", _row_max, _row_max_shape)
row_sum = define("row_sum", _row_sum, _row_sum_shape)
log_softmax = define("log_softmax", _log_softmax, _log_softmax_shape)
logsumexp = define("logsumexp", _logsumexp, _logsumexp_shape)
row_total = define("row_total", _row_total, _row_total_shape)
log_softmax_backward = define("log_softmax_backward", _log_softmax_backward, _log_softmax_backward_shape)

Add = Callable[[Any, tuple[Any, ...], TensorMeta], Ref]
"""Adds an operator with its arguments to a graph, where its result is a tensor like this, and gives the result."""
MetaOf = Callable[[Ref], TensorMeta]
"""What is known of a tensor of the graph."""


def in_parts(op: Any, args: tuple[Any, ...], meta_of: MetaOf, add: Add) -> tuple[Any, tuple[Any, ...]]:
    """The last of the operators that an operator becomes, with its arguments, once the others were added; the operator
    itself where it is none of these.

    They are captured on the CPU, where log-softmax always gives the dtype that it takes.
    """
    over_one = op is aten.logsumexp.default and len(args[1]) == 1 and meta_of(args[0]).dtype.is_floating_point
    if op is aten._log_softmax.default or over_one:
        x, meta = args[0], meta_of(args[0])
        dim = (args[1][0] if over_one else args[1]) % max(1, len(meta.shape))
        largest = add(row_max, (x, dim), TensorMeta(_rows(meta.shape, dim), meta.dtype))
        total = add(row_sum, (x, largest, dim), TensorMeta(_rows(meta.shape, dim), wide(meta.dtype)))
        if over_one:
            return logsumexp, (x, largest, total, dim, len(args) > 2 and bool(args[2]))
        return log_softmax, (x, largest, total, dim)
    if op is aten._log_softmax_backward_data.default:
        grad, result, dim, dtype = args
        meta = meta_of(grad)
        dim %= max(1, len(meta.shape))
        total = add(row_total, (grad, dim), TensorMeta(_rows(meta.shape, dim), wide(meta.dtype)))
        return log_softmax_backward, (grad, result, total, dim, dtype)
    return op, args
