"""Variances and deviations in parts against torch's own, put together of uneven blocks of every row."""

from __future__ import annotations

import pytest
import torch

from autoshard.capture.operators.spread_parts import row_mean, row_variance, spread, spread_and_mean


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dims", "cut"), [([1], 1), ([0, 2], 2), ([0, 1, 2], 0)])
@pytest.mark.parametrize("correction", [0.0, 1.0, 0.5])
def test_blocks_put_together_are_the_whole(dtype: torch.dtype, dims: list[int], cut: int, correction: float) -> None:
    """Of rows that are far from zero, of equal numbers, and with a NaN and an infinity."""
    x = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    special = x + 100
    special[0, 0, 0], special[1, 1, 1] = float("nan"), float("inf")
    for whole in (x, x + 100, torch.full_like(x, 0.5), special):
        count = whole.numel() // whole.sum(dims).numel()
        blocks = whole.split(3, cut)
        mean = torch.stack([row_mean(block, dims, count) for block in blocks]).sum(0)
        given = [(block, mean, dims, count - correction) for block in blocks]
        variance = torch.stack([row_variance(*each) for each in given]).sum(0)
        for keepdim in (True, False):
            for is_root, theirs in ((False, torch.var_mean), (True, torch.std_mean)):
                taken = (blocks[0], mean, variance, dims, correction, keepdim, is_root)
                found, expected = spread_and_mean(*taken), theirs(whole, dims, correction=correction, keepdim=keepdim)
                torch.testing.assert_close((spread(*taken), found[0]), (expected[0],) * 2, equal_nan=True)
                if whole is not special:  # of which torch's mean is NaN here, and infinite by itself
                    torch.testing.assert_close(found[1], expected[1])
    last = [(op, (*taken[:5], keepdim, True)) for op in (spread, spread_and_mean) for keepdim in (False, True)]
    for op, args in [(row_mean, (x, dims, 9)), (row_variance, given[0]), *last]:
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
