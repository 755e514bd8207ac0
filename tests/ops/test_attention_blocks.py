"""Causal attention of a block of queries against torch's own of all of them, derivatives included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.capture.operators.attention import attention, attention_of_blocks, attention_of_blocks_backward
from autoshard.layout import block


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.sampled_from([None, 0.3]), st.integers(0, 3))
def test_blocks_put_together_are_the_whole_and_their_gradients_add_up(
    queries: int, keys: int, ranks: int, scale: float | None, seed: int
) -> None:
    """Uneven and empty blocks, and more or fewer keys than queries."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        torch.randn(2, 3, length, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for length in (queries, keys, keys, queries)
    )
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    derivatives = torch.autograd.grad(expected, (q, k, v), grad)
    results, gradients = [], []
    with torch.no_grad():
        for lo, hi in (block(queries, ranks, rank) for rank in range(ranks)):
            if lo < hi:
                mine = q[:, :, lo:hi].contiguous()
                out, lse = attention_of_blocks(mine, k, v, scale, [lo])
                given = grad[:, :, lo:hi].contiguous()
                gradients.append(attention_of_blocks_backward(given, mine, k, v, out, lse, scale, [lo]))
                results.append(out)
    dq, dk, dv = zip(*gradients)
    found = (torch.cat(results, 2), torch.cat(dq, 2), sum(dk), sum(dv))
    for ours, theirs in zip(found, (expected, *derivatives)):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("ranks", "parts", "block"), [(2, 2, 1), (2, 4, 3), (4, 3, 2), (3, 2, 2)])
def test_blocks_of_every_part_are_the_whole_and_their_gradients_add_up(ranks: int, parts: int, block: int) -> None:
    length = ranks * parts * block
    q, k, v, grad = (torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=True) for _ in range(4))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    derivatives = torch.autograd.grad(expected, (q, k, v), grad)
    out, dq = torch.empty_like(expected), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    with torch.no_grad():
        for rank in range(ranks):
            firsts = [(part * ranks + rank) * block for part in range(parts)]
            rows = torch.cat([torch.arange(first, first + block) for first in firsts])
            mine, given = q[:, :, rows], grad[:, :, rows]
            found, lse = attention_of_blocks(mine, k, v, None, firsts)
            out[:, :, rows] = found
            block_dq, block_dk, block_dv = attention_of_blocks_backward(given, mine, k, v, found, lse, None, firsts)
            dq[:, :, rows] = block_dq
            dk += block_dk
            dv += block_dv
    for ours, theirs in zip((out, dq, dk, dv), (expected, *derivatives)):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 3])
def test_a_block_has_the_dtypes_and_strides_of_the_whole(dtype: torch.dtype, first: int) -> None:
    q, k = torch.randn(1, 2, 3, 4, dtype=dtype), torch.randn(1, 2, 6, 4, dtype=dtype)
    whole = attention(q, k, k, None, True, None)
    mine = attention_of_blocks(q, k, k, None, [first])
    several = attention_of_blocks(torch.cat([q, q], 2), k, k, None, [first, first])
    assert [each.stride() for each in several] == [
        each.stride() for each in attention(torch.cat([q, q], 2), k, k, None, True, None)
    ]
    for ours, theirs in zip(mine, whole):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())


@pytest.mark.parametrize("firsts", [[0], [3], [9], [0, 2, 4]])
def test_torch_accepts_the_operators_of_blocks(firsts: list[int]) -> None:
    """Schema, shapes without values, and no result that is an argument."""
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 6, 4)
    out, lse = attention_of_blocks(q, k, k, None, firsts)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(attention_of_blocks, (q, k, k, None, firsts), test_utils=utils)
    torch.library.opcheck(attention_of_blocks_backward, (q, q, k, k, out, lse, None, firsts), test_utils=utils)
