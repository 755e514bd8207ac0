"""Lengths over the batch, and of weights, as roots of sums of squares, which ranks can add up.

Over other dims torch's own stay, but for lengths over channels, which a layer may be cut along, and for lengths of what
no input reaches: of a weight that is divided by them, whatever dim it is cut along.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..ancestors import ancestors
from ..examples import tensor_of

_LENGTHS = {
    **dict.fromkeys((torch.norm, "norm"), ("p", ("fro", 2))),
    torch.linalg.norm: ("ord", (None, "fro")),
    torch.linalg.vector_norm: ("ord", (2,)),
}
"""Norms: how they name their order, and the orders by which each is a length, which it is where none is given."""


def take_length_apart(node: fx.Node) -> bool:
    """Rewrites a call of torch in place if it is the square root of the sum of squares over dim 0, or of a weight, or
    divides by that; else False.
    """
    if node.target in _DIVIDED:
        return _take_division_apart(node)
    if node.target not in _LENGTHS or not node.args:
        return False
    value, made, (order, lengths) = tensor_of(node.args[0]), tensor_of(node), _LENGTHS[node.target]
    names = (order, "dim", "keepdim")
    given: dict[str, Any] = dict(zip(names, node.args[1:])) | node.kwargs
    if value is None or made is None or not value.dim() or not value.is_floating_point():
        return False
    dim, is_of_rows = given.get("dim"), given.get(order) == 2 and isinstance(given.get("dim"), int)
    dims = [d % value.dim() for d in ([dim] if isinstance(dim, int) else dim or range(value.dim()))]
    is_length = order not in given or given[order] in lengths or is_of_rows
    if not (is_length and given.keys() <= set(names) and (0 in dims or _is_taken(node, value, dims))):
        return False
    keepdim, dtype = bool(given.get("keepdim")), made.dtype  # another than the tensor's under autocast
    node.op, node.target, node.args, node.kwargs = "call_function", _length, (node.args[0], dims, keepdim, dtype), {}
    return True


def _take_division_apart(node: fx.Node) -> bool:
    value = tensor_of(node.args[0]) if node.args else None
    if value is None or not value.dim() or not value.is_floating_point():
        return False
    given: dict[str, Any] = dict(zip(("p", "dim"), node.args[1:])) | node.kwargs
    dim = given.get("dim", 1)
    dims = [d % value.dim() for d in ([dim] if isinstance(dim, int) else dim)] if node.target is F.normalize else []
    if not _is_taken(node, value, dims):
        return False
    node.target = _DIVIDED[node.target]
    return True


def _is_taken(node: fx.Node, value: Tensor, dims: list[int]) -> bool:
    """Whether a length is one over channels, dim 1 of (N, C, ...), or no input of the model reaches it."""
    if 1 in dims and value.dim() > 2 and value.dim() - 1 not in dims:
        return True
    return not any(each.op == "placeholder" for each in ancestors([node]))


def _normalize(x: Tensor, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Tensor | None = None) -> Tensor:
    if p != 2:
        return F.normalize(x, p, dim, eps, out)
    dims = [d % x.dim() for d in ([dim] if isinstance(dim, int) else dim)]
    return torch.div(x, _length(x, dims, True, x.dtype).clamp_min(eps), out=out)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Of directions and lengths; those are along a dim, or it is -1 and there is one."""
    dims = [d for d in range(v.dim()) if dim == -1 or d != dim % v.dim()]
    if not dims:
        return torch._weight_norm(v, g, dim)
    wide = _wide(v)
    return (wide * (g / _length(wide, dims, dim != -1, wide.dtype))).to(v.dtype)


_DIVIDED: dict[Any, Any] = {F.normalize: _normalize, torch._weight_norm: _weight_norm}
"""What divides by lengths, and the same in parts."""


def _length(x: Tensor, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    return _root(_wide(x).square().sum(dims, keepdim=keepdim)).to(dtype)


def _wide(x: Tensor) -> Tensor:
    """Numbers as torch adds them up."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _root(x: Tensor) -> Tensor:
    """Square roots; the gradient of that of zero is zero, as it is of what torch makes the root of."""
    is_zero = x == 0
    return x.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)
