"""Log-softmax in parts against torch's own, whole and put together of blocks of every row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.capture.operators import few_rows
from autoshard.capture.operators.softmax_parts import (
    log_softmax,
    log_softmax_backward,
    logsumexp,
    row_max,
    row_sum,
    row_total,
)
from autoshard.layout import block

aten = torch.ops.aten


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2), st.integers(0, 3), st.booleans())
def test_blocks_of_rows_put_together_are_the_whole(
    rows: int, length: int, ranks: int, dim: int, seed: int, is_hidden: bool
) -> None:
    """Uneven and empty blocks, rows along any dim, blocks that are hidden altogether, a NaN and what it spreads to."""
    generator = torch.Generator().manual_seed(seed)
    shape = [rows, 2, 3]
    shape[dim] = length
    x, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) * 40 for _ in range(2))
    blocks = [(lo, hi - lo) for lo, hi in (block(length, ranks, rank) for rank in range(ranks)) if lo < hi]
    if is_hidden:
        x.narrow(dim, *blocks[0]).fill_(float("-inf"))
    if seed == 3:
        x.view(-1)[0] = float("nan")
    expected = aten._log_softmax(x, dim, False)
    gradient = aten._log_softmax_backward_data(grad, expected, dim, torch.float64)
    mine, of_gradient = ([t.narrow(dim, *each) for each in blocks] for t in (x, grad))
    largest = torch.stack([row_max(each, dim) for each in mine]).amax(0)
    total = torch.stack([row_sum(each, largest, dim) for each in mine]).sum(0)
    results = [log_softmax(each, largest, total, dim) for each in mine]
    of_rows = torch.stack([row_total(each, dim) for each in of_gradient]).sum(0)
    gradients = [
        log_softmax_backward(each, result, of_rows, dim, torch.float64) for each, result in zip(of_gradient, results)
    ]
    torch.testing.assert_close(torch.cat(results, dim), expected, rtol=1e-9, atol=1e-11, equal_nan=True)
    torch.testing.assert_close(torch.cat(gradients, dim), gradient, rtol=1e-9, atol=1e-11, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9), st.integers(1, 4), st.integers(0, 2), st.booleans(), st.sampled_from(["", "-inf", "inf", "nan"])
)
def test_the_logarithm_of_sums_of_blocks_is_that_of_the_whole(
    length: int, ranks: int, dim: int, keepdim: bool, special: str
) -> None:
    """Rows that are infinite altogether, or in one place, and a NaN."""
    shape = [2, 2, 3]
    shape[dim] = length
    x = torch.randn(shape, generator=torch.Generator().manual_seed(length), dtype=torch.float64) * 40
    if special:
        x.select(dim, 0)[0] = float(special)
        x.select((dim + 1) % 3, 0).fill_(float(special))
    blocks = [x.narrow(dim, lo, hi - lo) for lo, hi in (block(length, ranks, rank) for rank in range(ranks)) if lo < hi]
    largest = torch.stack([row_max(each, dim) for each in blocks]).amax(0)
    total = torch.stack([row_sum(each, largest, dim) for each in blocks]).sum(0)
    for each in blocks:
        found = logsumexp(each, largest, total, dim, keepdim)
        torch.testing.assert_close(found, torch.logsumexp(x, dim, keepdim), rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "dim"), [((5, 9), 1), ((5, 9), 0), ((2, 9, 4), 1), ((7,), 0), ((), 0), ((0, 4), 1)])
@pytest.mark.parametrize(("held", "turned"), [(7, False), (1 << 20, False), (7, True), (1 << 20, True)])
def test_dtypes_and_shapes_are_those_of_torch_whatever_is_held_at_a_time(
    dtype: torch.dtype, shape: tuple[int, ...], dim: int, held: int, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And strides: results are contiguous, whatever they are made of."""
    monkeypatch.setitem(few_rows._HELD, "cpu", held)
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    if turned and len(shape) > 1:
        x, grad = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, grad))
    expected = aten._log_softmax(x, dim, False)
    largest = row_max(x, dim)
    total = row_sum(x, largest, dim)
    tolerance = {torch.float32: 1e-6}.get(dtype, 2e-2)
    torch.testing.assert_close(log_softmax(x, largest, total, dim), expected, rtol=tolerance, atol=tolerance)
    of_rows = row_total(grad, dim)
    found = log_softmax_backward(grad, expected, of_rows, dim, dtype)
    theirs = aten._log_softmax_backward_data(grad, expected, dim, dtype)
    torch.testing.assert_close(found, theirs, rtol=tolerance, atol=tolerance)
    utils = ("test_schema", "test_faketensor")
    for op, args in (
        (row_max, (x, dim)),
        (row_sum, (x, largest, dim)),
        (log_softmax, (x, largest, total, dim)),
        (logsumexp, (x, largest, total, dim, False)),
        (logsumexp, (x, largest, total, dim, True)),
        (row_total, (grad, dim)),
        (log_softmax_backward, (grad, expected, of_rows, dim, dtype)),
    ):
        torch.library.opcheck(op, args, test_utils=utils)
