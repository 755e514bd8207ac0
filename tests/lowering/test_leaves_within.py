"""Forwards that say of a tensor that its gradient is wanted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError

from .as_before import check_as_before


class Leaf(nn.Module):
    """Says of a tensor that its gradient is wanted, as what is made for checkpoints does (wav2vec 2.0)."""

    def __init__(self, mark: Callable[[nn.Linear, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.mark = nn.Linear(4, 4), mark
        self.linear.register_buffer("zero", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.mark(self.linear, x, x[:, None])
        return self.linear(h).sum() * (2 if h.requires_grad else 1)


def _wanted(x: Tensor, value: bool = True) -> Tensor:
    x.requires_grad = value
    return x


LEAVES: dict[str, Callable[[nn.Linear, Tensor, Tensor], Tensor]] = {
    "made": lambda linear, x, h: _wanted(h),
    "and what is made of it": lambda linear, x, h: _wanted(h) * 2,
    "in place": lambda linear, x, h: h.requires_grad_(),
    "detached": lambda linear, x, h: linear(h).detach().requires_grad_(True),
    "not so already": lambda linear, x, h: _wanted(h, False),
    "of a buffer": lambda linear, x, h: h + linear.get_buffer("zero").requires_grad_(),
    "of a parameter, so already": lambda linear, x, h: h * _wanted(linear.weight)[0],
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_tensor_whose_gradient_nobody_takes_may_ask_for_one(name: str) -> None:
    torch.manual_seed(0)
    model, args = Leaf(LEAVES[name]).double(), (torch.randn(2, 4, dtype=torch.float64),)
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["x=a:S(0)"], cache=False)
    check_as_before(model, args, plan, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "mark",
    [lambda linear, x, h: _wanted(x)[:, None], lambda linear, x, h: h * _wanted(linear.weight, False)[0]],
    ids=["input", "parameter"],
)
def test_a_forward_that_changes_whose_gradients_are_taken_is_refused(mark: Any) -> None:
    with pytest.raises(CaptureError, match="requires_grad"):
        capture(Leaf(mark), (torch.ones(2, 4),))
