"""What attention on a CUDA device does by itself: products where no kernel takes tensors, groups, and aligned biases.

Which kernel runs there, and that it is right, is measured on a device (``benchmarks/gpu.py attention``).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from autoshard.capture.operators.cuda_attention import aligned, written_out, written_out_backward


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "width"), [(5, 5, 6), (3, 7, 2), (7, 3, 6)])
def test_products_are_attention_and_its_derivative(
    groups: int, with_bias: bool, is_causal: bool, queries: int, keys: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((4, queries, 6), (groups, keys, 6), (groups, keys, width), (4, queries, width))
    q, k, v, grad = (torch.randn(2, *size, generator=generator, dtype=torch.float64) for size in sizes)
    bias = torch.randn(1, 4, queries, keys, generator=generator, dtype=torch.float64) if with_bias else None
    unseen = torch.zeros(queries, keys, dtype=torch.float64)
    if is_causal:
        unseen = unseen.masked_fill(torch.ones(queries, keys, dtype=torch.bool).triu(1), float("-inf"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = unseen if bias is None else unseen + bias
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=mask, scale=0.3, enable_gqa=True)
    derivatives = torch.autograd.grad(expected, leaves, grad)
    with torch.no_grad():
        out, lse = written_out(q, k, v, bias, is_causal, 0.3)
        found = out, *written_out_backward(grad, q, k, v, out, lse, bias, is_causal, 0.3)
    for ours, theirs in zip(found, (expected, *derivatives)):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_a_query_that_sees_no_key_gives_zeros() -> None:
    q, bias = torch.randn(1, 1, 2, 4), torch.tensor([[0.0, 0.0], [float("-inf"), float("-inf")]])
    out, lse = written_out(q, q, q, bias, False, 1.0)
    gradients = written_out_backward(torch.ones_like(out), q, q, q, out, lse, bias, False, 1.0)
    assert not out[0, 0, 1].any() and all(bool(gradient.isfinite().all()) for gradient in gradients)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(1, 40), st.integers(0, 3), st.booleans())
@example(1, 1, 1, 16, 0, True)
def test_rows_of_a_bias_begin_where_the_kernel_can_read_them(
    batch: int, heads: int, queries: int, keys: int, cut: int, is_turned: bool
) -> None:
    whole = (
        torch.randn(heads, keys + cut, queries + cut).mT if is_turned else torch.randn(heads, queries + cut, keys + cut)
    )
    bias = whole[:, cut:, cut:]
    q, k = torch.empty(batch, heads, queries, 1), torch.empty(batch, heads, keys, 1)
    found = aligned(bias, q, k)
    assert found is not None
    assert torch.equal(found, bias.expand(batch, heads, queries, keys))
    assert found.stride(-1) == 1 and all(step % 16 == 0 for step in found.stride()[:-1])
    assert found.storage_offset() % 16 == 0
