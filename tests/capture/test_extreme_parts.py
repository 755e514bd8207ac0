"""The largest and the least number in parts against torch's own, put together of blocks of the batch."""

from __future__ import annotations

import pytest
import torch

from autoshard.capture.operators.extreme_parts import as_whole, extreme

SPECIAL = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -1e-40]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dims", "keepdim"), [([0], False), ([0, 2], True), ([0, 1, 2], False)])
@pytest.mark.parametrize("is_least", [False, True])
def test_blocks_put_together_are_the_whole(dtype: torch.dtype, dims: list[int], keepdim: bool, is_least: bool) -> None:
    """Of whichever sign; a NaN in the first block or the last; rows of one number."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 14, 3, generator=generator).to(dtype)
    x[:, 6:8] = x[:, 6:8].abs() * torch.tensor([[1.0], [-1.0]])
    for k, number in enumerate(SPECIAL):
        x[-k % 5, k, k % 3] = x[:, k + 8] = number
    for given in (x, x[:, :8].nan_to_num(), -x[:, 2:].abs()):
        parts = torch.stack([as_whole(block, dims, keepdim, is_least) for block in given.split(2)])
        for block in given.split(2):
            found = extreme(block, parts.amax(0), dims, keepdim, is_least)
            expected = (torch.amin if is_least else torch.amax)(given, dims, keepdim)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(as_whole, (x, dims, keepdim, is_least), test_utils=utils)
    torch.library.opcheck(extreme, (x, parts[0], dims, keepdim, is_least), test_utils=utils)
