"""``nn.MultiheadAttention`` with the batch in front, so that it can be cut.

torch's own multiplies ``(steps * rows, features)`` with the weights, of which no block is the steps of some rows. Here
that product is of ``(rows * steps, features)``.

Shapes: B rows, T and S steps of queries and of keys, E features, H heads of E / H features.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention_parts import attention_in_parts
from .matrix_products import product


def multihead_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: None,
    bias_v: None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: None = None,
    static_v: None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What ``F.multi_head_attention_forward``, whose arguments these are, gives: (T, B, E), and weights (B, T, S) or
    (B, H, T, S) or None. Queries are (T, B, E), keys and values (S, B, E), masks (T, S), (B * H, T, S)
    or (B, H, T, S), and (B, S).
    """
    packed = None if use_separate_proj_weight else in_proj_weight
    weights = packed.chunk(3) if packed is not None else (q_proj_weight, k_proj_weight, v_proj_weight)
    if packed is not None and query is key and key is value:
        projected: Any = F.linear(query.transpose(0, 1), packed, in_proj_bias).chunk(3, -1)
    else:
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        given = zip((query, key, value), weights, biases)
        projected = [F.linear(x.transpose(0, 1), weight, bias) for x, weight, bias in given]  # type: ignore[arg-type]
    q, k, v = (x.unflatten(-1, (num_heads, -1)).transpose(1, 2) for x in projected)  # (B, H, steps, E / H)

    dropped = dropout_p if training else 0.0
    is_hint = is_causal and key_padding_mask is None and not need_weights
    mask = None if is_hint else _mask(attn_mask, key_padding_mask, query.dtype, num_heads)
    seen = None
    if need_weights:
        scores = product(q * math.sqrt(num_heads / embed_dim_to_check), k.transpose(-2, -1))
        seen = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropped, dropped > 0.0)
        mixed = product(seen, v)
        seen = seen.mean(1) if average_attn_weights else seen
    elif dropped > 0 or (mask is not None and mask.requires_grad):
        mixed = attention_in_parts(q, k, v, mask, dropped, is_hint)
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropped, is_hint)
    found = F.linear(mixed.transpose(1, 2).flatten(2), out_proj_weight, out_proj_bias)
    return found.transpose(0, 1).contiguous(), seen  # in memory as torch's, which says in what order dropout draws


def _mask(attention: Tensor | None, padding: Tensor | None, dtype: torch.dtype, heads: int) -> Tensor | None:
    """Both masks added up as numbers, of a shape like (B, H, T, S)."""
    found = None if attention is None else _numbers(attention, dtype)
    if found is not None:
        found = found[None, None] if found.dim() == 2 else found
        found = found.unflatten(0, (-1, heads)) if found.dim() == 3 else found
    if padding is None:
        return found
    padded = _numbers(padding, dtype)[:, None, None]
    return padded if found is None else found + padded


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


_OTHERS = ((7, "bias_k"), (8, "bias_v"), (9, "add_zero_attn"), (21, "static_k"), (22, "static_v"))


def has_a_batch(steps: int, *args: Any, **kwargs: Any) -> bool:
    """Whether a call of ``F.multi_head_attention_forward`` is one that :func:`multihead_attention` can stand for.

    ``steps`` is the number of dims of the queries: a single row is torch's own.
    """
    given = dict(enumerate(args))
    return steps == 3 and not any(kwargs.get(name, given.get(k)) for k, name in _OTHERS)
