"""Attention as one canonical operator, whichever kernel a device picks.

A model is captured on fake CPU tensors, where ``F.scaled_dot_product_attention`` becomes the CPU flash kernel and its
backward. Capture writes both as ``autoshard::attention`` and ``autoshard::attention_backward``, so that a plan says the
same on every device; lowering calls them, and each picks a kernel of torch for the device it runs on.

Shapes: B batch, H heads, T query length, S key length, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

aten = torch.ops.aten


@torch.library.custom_op("autoshard::attention", mutates_args=())
def attention(
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
    if q.device.type == "cuda":
        out, lse, _, _ = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, is_causal, scale=scale)
        return out.contiguous(), lse[..., : q.shape[2]].contiguous()
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
    return out.contiguous(), lse.contiguous()


# torch reads the schema of an operator off the signature, and calls the function for its shapes with the same one.
@attention.register_fake
def _attention_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: object, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    lse_dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=lse_dtype)


@torch.library.custom_op("autoshard::attention_backward", mutates_args=())
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
    """The gradients of :func:`attention` with respect to q, k and v."""
    if q.device.type == "cuda":
        # the kernel wants the rows of the logsumexp padded to a multiple of 32 (torch's own autograd keeps them so)
        padded = F.pad(lse, (0, -lse.shape[-1] % 32))
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, bias, out, padded, zero, zero, 0.0, [True, True, True, False], is_causal, scale=scale
        )
    else:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad.contiguous(), q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@attention_backward.register_fake
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
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
