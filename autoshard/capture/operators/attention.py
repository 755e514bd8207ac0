"""Attention as one canonical operator, whichever kernel a device picks.

A model is captured on fake CPU tensors, where ``F.scaled_dot_product_attention`` becomes the CPU flash kernel and its
backward. Capture writes both as ``autoshard::attention`` and ``autoshard::attention_backward``, so that a plan says the
same on every device; lowering calls them, and each picks a kernel of torch for the device it runs on.

Where a rank has blocks of the queries of causal attention, ``autoshard::attention_of_blocks`` and its backward run: the
keys in front of a block are seen by all its queries, those beside it causally, and those behind it by none.

Shapes: B batch, H heads, T query length, S key length, D head size. Results of shape (B, H, T, D) lie in memory as
(B, T, H, D), which is how torch's kernels write them: what models make of them, (B, T, H * D), is a view then.
"""

from __future__ import annotations

import torch

from . import cuda_attention
from .library import define

aten = torch.ops.aten


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (B, H, T, D) on k and v (B, H, S, D), with an additive bias that broadcasts to (B, H, T, S).

    Returns the result (B, H, T, D) and the logsumexp of the scores (B, H, T) in float32 (float64 for float64).
    """
    q, k, v = map(_in_rows, (q, k, v))
    if q.device.type == "cuda":
        out, lse = cuda_attention.attention(q, k, v, bias, is_causal, scale)
        return _positions_first(out), lse.contiguous()
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
    return _positions_first(out), lse.contiguous()


def _attention_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: object, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(q, (*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=logsumexp_dtype(q.dtype))


def logsumexp_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the logsumexp of scores of a dtype."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _empty(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    batch, heads, length, size = shape
    return like.new_empty((batch, length, heads, size)).transpose(1, 2)


def _positions_first(result: torch.Tensor) -> torch.Tensor:
    """A result (B, H, T, D) that lies in memory as (B, T, H, D); a copy only where it does not yet."""
    return result.transpose(1, 2).contiguous().transpose(1, 2)


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose last dim lies in rows: the kernels read rows of D, whatever the stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of :func:`_attention` with respect to q, k and v."""
    grad = grad.contiguous() if 0 in grad.stride() else grad
    grad, q, k, v, out = map(_in_rows, (grad, q, k, v, out))
    if q.device.type == "cuda":
        dq, dk, dv = cuda_attention.attention_backward(grad, q, k, v, out, lse, bias, is_causal, scale)
    else:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    return _positions_first(dq), _positions_first(dk), _positions_first(dv)


def _attention_backward_shapes(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: object,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(q, q.shape), _empty(k, k.shape), _empty(v, v.shape)


attention = define("attention", _attention, _attention_shapes)
attention_backward = define("attention_backward", _attention_backward, _attention_backward_shapes)


def _attention_of_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, firsts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of equal blocks of queries, one behind the other; row 0 of each is the query of the whole that
    ``firsts`` says, and sees as many keys and one more.
    """
    if len(firsts) == 1:
        return _attention_of_block(q, k, v, scale, firsts[0])
    found = [_attention_of_block(each, k, v, scale, first) for each, first in zip(_blocks(q, firsts), firsts)]
    out, lse = zip(*found)
    return _positions_first(torch.cat(out, 2)), torch.cat(lse, 2)


def _attention_of_blocks_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, firsts: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    return _attention_shapes(q, k, v, None, True, scale)


def _attention_of_blocks_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float | None,
    firsts: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of :func:`_attention_of_blocks`: of k and v what the queries of all blocks add to them."""
    if len(firsts) == 1:
        return _attention_of_block_backward(grad, q, k, v, out, lse, scale, firsts[0])
    blocks = zip(*(_blocks(each, firsts) for each in (grad, q, out, lse)))
    dq: list[torch.Tensor] = []
    dk, dv = _empty(k, k.shape).zero_(), _empty(v, v.shape).zero_()
    for first, (block_grad, block_q, block_out, block_lse) in zip(firsts, blocks):
        given = block_grad, block_q, k, v, block_out, block_lse.contiguous()
        block_dq, block_dk, block_dv = _attention_of_block_backward(*given, scale, first)
        dq.append(block_dq)
        dk += block_dk
        dv += block_dv
    return _positions_first(torch.cat(dq, 2)), dk, dv


def _attention_of_blocks_backward_shapes(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float | None,
    firsts: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _attention_backward_shapes(grad, q, k, v, out, lse, None, True, scale)


def _blocks(queries: torch.Tensor, firsts: list[int]) -> tuple[torch.Tensor, ...]:
    """What has a row for each query in dim 2, block by block."""
    return queries.chunk(len(firsts), 2)


def _attention_of_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of a block of queries; its row 0 is query ``first`` of the whole and sees ``first + 1`` keys.

    What two kernels make, of the keys in front of the block and of those beside it, becomes one by their logsumexps.
    Source: H. Liu et al., Ring Attention, arXiv:2310.01889, section 3.
    """
    before, beside = _keys_of_block(q, k, first)
    if not before:
        return _attention(q, k[:, :, :beside], v[:, :, :beside], None, True, scale)
    whole, lse = _attention(q, k[:, :, :before], v[:, :, :before], None, False, scale)
    if beside == before:
        return whole, lse
    causal, beside_lse = _attention(q, k[:, :, before:beside], v[:, :, before:beside], None, True, scale)
    share = torch.sigmoid(beside_lse - lse)[..., None]
    merged = torch.lerp(whole.to(share.dtype), causal.to(share.dtype), share).to(q.dtype)
    return _positions_first(merged), torch.logaddexp(lse, beside_lse)


def _attention_of_block_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float | None,
    first: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of :func:`_attention_of_block`: of k and v what the queries of the block add to them.

    With the logsumexp of all keys, what a kernel makes of some of the keys is their part of the whole.
    """
    before, beside = _keys_of_block(q, k, first)
    parts = [(0, before, False), (before, beside, True)]
    found = [
        _attention_backward(grad, q, k[:, :, lo:hi], v[:, :, lo:hi], out, lse, None, causal, scale)
        for lo, hi, causal in parts
        if lo < hi
    ]
    dq = found[0][0] if len(found) == 1 else found[0][0] + found[1][0]
    dk, dv = _empty(k, k.shape).zero_(), _empty(v, v.shape).zero_()
    start = 0
    for _, part_k, part_v in found:
        stop = start + part_k.shape[2]
        dk[:, :, start:stop], dv[:, :, start:stop] = part_k, part_v
        start = stop
    return dq, dk, dv


def _keys_of_block(q: torch.Tensor, k: torch.Tensor, first: int) -> tuple[int, int]:
    """How many keys stand in front of a block of queries, and how many up to its end."""
    return min(first, k.shape[2]), min(first + q.shape[2], k.shape[2])


attention_of_blocks = define("attention_of_blocks", _attention_of_blocks, _attention_of_blocks_shapes)
attention_of_blocks_backward = define(
    "attention_of_blocks_backward", _attention_of_blocks_backward, _attention_of_blocks_backward_shapes
)
