"""Pictures with several dims in front are sampled as torch samples them one by one."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.capture.operators.picture_samples import sampled


def _given(front: tuple[int, int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Pictures that do not lie in memory in the order of their dims, and places in them, and beside them."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(*front[::-1], 4, 3, 5, dtype=torch.float64, generator=generator).transpose(0, 1).mT
    grid = torch.randn(*front, 2, 6, 2, dtype=torch.float64, generator=generator)
    return image.to(dtype).detach().requires_grad_(), grid.to(dtype).requires_grad_()


def _torchs(image: Tensor, grid: Tensor, *how: object) -> Tensor:
    found = F.grid_sample(image.flatten(0, 1), grid.flatten(0, 1), *how)  # type: ignore[arg-type]
    return found.unflatten(0, image.shape[:2])


@pytest.mark.parametrize("align_corners", [False, True, None])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_samples_are_torchs_with_their_gradients(mode: str, padding: str, align_corners: bool | None) -> None:
    given = _given((2, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch tells what it takes where nothing is said
        made, expected = (function(*given, mode, padding, align_corners) for function in (sampled, _torchs))
    assert torch.equal(made, expected) and made.is_contiguous()
    gradient = torch.randn(made.shape, dtype=made.dtype)
    for one, other in zip(*(torch.autograd.grad(result, given, gradient) for result in (made, expected)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("wanted", [0, 1])
def test_one_gradient_alone(wanted: int) -> None:
    given = _given((2, 3))
    given[1 - wanted].requires_grad_(False)
    (made,), (expected,) = (
        torch.autograd.grad(function(*given, "bilinear", "zeros", False).square().sum(), [given[wanted]])
        for function in (sampled, _torchs)
    )
    assert torch.equal(made, expected)


def test_without_a_picture_there_is_nothing() -> None:
    given = _given((2, 0))
    made = sampled(*given, align_corners=False)
    shapes = (each.to("meta") for each in given)
    assert made.shape == (2, 0, 4, 2, 6) == torch.ops.autoshard.sample.default(*shapes, 0, 0, False).shape
    made.sum().backward()
    assert all(each.grad is not None and each.grad.shape == each.shape for each in given)


def test_autocast_says_what_is_cast() -> None:
    given = _given((2, 3), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        made, expected = (function(*given, "bilinear", "zeros", False) for function in (sampled, _torchs))
    assert made.dtype == expected.dtype and torch.equal(made, expected)
