"""Attention on a CUDA device: the kernel that torch would pick there, called as torch calls it.

``F.scaled_dot_product_attention`` asks ``aten::_fused_sdp_choice`` which kernel takes its arguments, and brings these
into the form that the kernel wants. So does this: heads of a size that is no multiple of eight are padded for the flash
kernel, a bias is expanded and its rows are padded for the kernel of xFormers, and heads of keys that several heads of
queries share are repeated where a kernel does not know of groups. Where no kernel takes them (float64), the products
are written out.

All of them give the logsumexp of the scores, so that a backward need not run on the kernel of its forward.

Source: aten/src/ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp of torch 2.11.

Shapes: as in :mod:`autoshard.capture.operators.attention`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

aten = torch.ops.aten

_BIAS_ROW = 16
"""Elements: rows of a bias that begin at multiples of it are aligned for the kernel of xFormers in every dtype."""


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result (B, H, T, D) and the logsumexp of the scores (B, H, T)."""
    q, k, v = map(_rows_in_one_piece, (q, k, v))
    scale = scale if scale is not None else q.shape[-1] ** -0.5
    match kernel_for(q, k, v, bias, is_causal, scale):
        case SDPBackend.FLASH_ATTENTION:
            out, lse, *_ = aten._scaled_dot_product_flash_attention(
                *map(_to_eight, (q, k, v)), 0.0, is_causal, scale=scale
            )
            return out[..., : v.shape[-1]], lse
        case SDPBackend.CUDNN_ATTENTION:
            out, lse, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, is_causal, scale=scale)
            return out, lse.view(q.shape[:3])
        case SDPBackend.EFFICIENT_ATTENTION:
            k, v = (_a_head_each(x, q) for x in (k, v))
            rows = aligned(bias, q, k)
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(
                q, k, v, rows, True, 0.0, is_causal, scale=scale
            )
            return out, lse[..., : q.shape[2]]
    return written_out(q, k, v, bias, is_causal, scale)


def attention_backward(
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
    """The gradients of :func:`attention` with respect to q, k and v; rows of ``grad`` lie in one piece."""
    q, k, v, out = map(_rows_in_one_piece, (q, k, v, out))
    scale = scale if scale is not None else q.shape[-1] ** -0.5
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of a generator that nothing is drawn from
    length, keys = q.shape[2], k.shape[2]
    match kernel_for(q, k, v, bias, is_causal, scale):
        case SDPBackend.FLASH_ATTENTION:
            padded = map(_to_eight, (grad, q, k, v, out))
            found = aten._scaled_dot_product_flash_attention_backward(
                *padded, lse, None, None, length, keys, 0.0, is_causal, none, none, scale=scale
            )
            dq, dk, dv = (dx[..., : x.shape[-1]] for dx, x in zip(found, (q, k, v)))
            return dq, dk, dv
        case SDPBackend.CUDNN_ATTENTION:
            return aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
                *(grad, q, k, v, out, lse[..., None], none, none, bias, None, None, length, keys, 0.0, is_causal),
                scale=scale,
            )
        case SDPBackend.EFFICIENT_ATTENTION:
            # rows of the logsumexp at multiples of 32, as the forward of the kernel leaves them
            padded_lse = F.pad(lse, (0, -length % 32))
            all_k, all_v = (_a_head_each(x, q) for x in (k, v))
            dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
                *(grad, q, all_k, all_v, aligned(bias, q, k), out, padded_lse, none, none),
                *(0.0, [True, True, True, False], is_causal),
                scale=scale,
            )
            return dq, _of_groups(dk, k), _of_groups(dv, v)
    return written_out_backward(grad, q, k, v, out, lse, bias, is_causal, scale)


def written_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`attention` from its products; a query that sees no key gives zeros."""
    k, v = (_a_head_each(x, q) for x in (k, v))
    scores = _scores(q, k, bias, is_causal, scale)
    lse = scores.logsumexp(-1)
    return _shares(scores, lse).to(v.dtype) @ v, lse


def written_out_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`attention_backward` from its products. Source: FlashAttention, arXiv:2205.14135, appendix B.2."""
    all_k, all_v = (_a_head_each(x, q) for x in (k, v))
    shares = _shares(_scores(q, all_k, bias, is_causal, scale), lse)
    of_shares = (grad @ all_v.mT).to(shares.dtype)
    whole = (grad * out).sum(-1, keepdim=True, dtype=shares.dtype)
    of_scores = (shares * (of_shares - whole) * scale).to(q.dtype)
    dk, dv = of_scores.mT @ q, shares.to(grad.dtype).mT @ grad
    return of_scores @ all_k, _of_groups(dk, k), _of_groups(dv, v)


def _scores(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor | None, is_causal: bool, scale: float) -> torch.Tensor:
    """The scores (B, H, T, S), of float64 in its own precision and of others in float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).mT) * scale
    if bias is not None:
        scores = scores + bias
    if is_causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, float("-inf"))
    return scores


def _shares(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])


def kernel_for(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, is_causal: bool, scale: float
) -> SDPBackend:
    """What torch picks for these arguments; the user's own choice (``torch.nn.attention.sdpa_kernel``) counts."""
    grouped = k.shape[1] != q.shape[1]
    with torch.enable_grad():
        q = q.detach().requires_grad_()  # some kernels have no backward for some sizes on some devices
        choice = _choice(q, k, v, bias, 0.0, is_causal, scale=scale, enable_gqa=grouped)
        if choice is SDPBackend.MATH and grouped:  # no kernel that knows of groups takes them; one that does not may
            k, v = (_a_head_each(x, q) for x in (k, v))
            one = _choice(q, k, v, bias, 0.0, is_causal, scale=scale)
            return one if one is SDPBackend.EFFICIENT_ATTENTION else SDPBackend.MATH
    return choice


def _choice(*args: Any, **kwargs: Any) -> SDPBackend:
    return SDPBackend(torch._fused_sdp_choice(*args, **kwargs))


def _rows_in_one_piece(x: torch.Tensor) -> torch.Tensor:
    """The kernels read rows of D."""
    return x.contiguous() if 0 in x.stride() or x.stride(-1) != 1 else x


def _to_eight(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


def _a_head_each(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values (B, K, S, D) with a head for each of the queries': (B, H, S, D)."""
    copies = q.shape[1] // x.shape[1]
    return x if copies == 1 else x.repeat_interleave(copies, dim=1)


def _of_groups(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of keys or values (B, K, S, D) from that of what :func:`_a_head_each` made of them."""
    groups = x.shape[1]
    return gradient if gradient.shape[1] == groups else gradient.unflatten(1, (groups, -1)).sum(2)


def aligned(bias: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """A bias for all heads, (B, H, T, S), every row of which begins at an address that the kernel can read from."""
    if bias is None:
        return None
    keys = bias.shape[-1]
    at_rows = all(step % _BIAS_ROW == 0 for step in bias.stride()[:-1]) and bias.storage_offset() % _BIAS_ROW == 0
    if bias.stride(-1) != 1 or not at_rows:
        more = -keys % _BIAS_ROW
        bias = F.pad(bias, (0, more))[..., :keys] if more else bias.clone(memory_format=torch.contiguous_format)
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
