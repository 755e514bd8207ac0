"""Attention that torch has no kernel for on the CPU, as products of matrices that keep their heads.

Where a mask wants a gradient (relative positions that are learned), scores are dropped, or values are of another length
than keys, torch multiplies batches of ``B * H`` matrices. Of that dim no block is some heads of several rows; here each
of the dims in front can be cut.

Shapes: B batch, H heads, T query length, S key length, D head size, E that of values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..examples import example
from .matrix_products import product

_DIMS = 4


def attention_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """What ``F.scaled_dot_product_attention``, whose arguments these are, gives; under autocast torch's own.

    Queries are (B, H, T, D), keys (B, H, S, D), values (B, H, S, E), of one head for all queries, or of fewer heads
    where ``enable_gqa``; of each B may be 1; masks are like (B, H, T, S). Numbers of 16 bits are computed in 32, as
    torch does.
    """
    if torch.is_autocast_enabled(query.device.type):
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    dtype = torch.float32 if query.dtype in (torch.float16, torch.bfloat16) else query.dtype
    q, k, v = _for_each(*(x.to(dtype) for x in (query, key, value)))
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    half = math.sqrt(abs(factor))  # of both, so that no score is too large
    scores = product(q * math.copysign(half, factor), (k * half).mT)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.ops.aten._safe_softmax.default(scores, -1)  # nothing where all keys are masked, no NaN
    if dropout_p > 0:
        weights = F.dropout(weights, dropout_p)
    return product(weights, v).to(query.dtype)


def attention_of_views(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``F.scaled_dot_product_attention`` of keys and values that have one head for all of the queries, or of one row
    for all rows of the others (learned queries): each has its own view of it, for which torch has a kernel.
    """
    return F.scaled_dot_product_attention(*_for_each(query, key, value), *args, **kwargs)


def _for_each(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of as many rows and heads."""
    key, value = (_for_each_head(x, query.shape[1]) for x in (key, value))
    rows = max(x.shape[0] for x in (query, key, value))
    q, k, v = (x if x.shape[0] == rows else x.expand(rows, -1, -1, -1) for x in (query, key, value))
    return q, k, v


def _for_each_head(x: Tensor, heads: int) -> Tensor:
    """(B, H / n, S, D) as (B, H, S, D), each head n times."""
    if x.shape[1] in (1, heads):
        return x.expand(-1, heads, -1, -1)
    return x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


def is_without_kernel(node: fx.Node) -> bool:
    """Whether a node is attention that :func:`attention_in_parts` can stand for, and torch has no kernel for."""
    if node.target is not F.scaled_dot_product_attention:
        return False
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    given = {**dict(zip(names, node.args)), **node.kwargs}
    q, k, v, mask = (example(given.get(name)) for name in names[:4])
    if not _are_of_rows(q, k, v):
        return False
    if any(x.shape[1] not in (1, q.shape[1]) and not given.get("enable_gqa") for x in (k, v)):
        return False
    dropped = given.get("dropout_p", 0.0)
    is_dropped = isinstance(dropped, (int, float)) and dropped > 0
    return is_dropped or q.shape[-1] != v.shape[-1] or (mask is not None and mask.requires_grad)


def is_of_views(node: fx.Node) -> bool:
    """Whether a node is attention that :func:`attention_of_views` can stand for."""
    if node.target is not F.scaled_dot_product_attention:
        return False
    given = {**dict(zip(("query", "key", "value"), node.args)), **node.kwargs}
    q, k, v = (example(given.get(name)) for name in ("query", "key", "value"))
    if not _are_of_rows(q, k, v):
        return False
    heads, rows = {k.shape[1], v.shape[1]}, {x.shape[0] for x in (q, k, v)}
    is_of_one = 1 in heads and q.shape[1] > 1
    return heads <= {1, q.shape[1]} and (is_of_one or len(rows) > 1)


def _are_of_rows(*tensors: Any) -> bool:
    """Whether queries, keys and values are of heads and of rows, or of one row for all."""
    if any(not isinstance(x, Tensor) or x.dim() != _DIMS for x in tensors):
        return False
    return len({x.shape[0] for x in tensors} - {1}) < 2
