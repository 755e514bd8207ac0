"""Models that cannot be captured: the error names the line of the model, and the next capture works."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import capture
from autoshard.errors import CaptureError

from ..models import mlp


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()  # culprit
        return y + 1


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()  # culprit


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # culprit
            return x
        return -x


class Nonzero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sum()  # culprit


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor([1.0] * 20_000).sum()  # culprit


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.ones(7, 7)  # culprit


class Inside(nn.Module):
    def __init__(self, culprit: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.culprit = culprit

    def forward(self, x: Tensor) -> Tensor:
        return self.culprit(self.linear(x))


def _line(model: type) -> int:
    lines, first = inspect.getsourcelines(model)
    return first + next(i for i, line in enumerate(lines) if "# culprit" in line)


@pytest.mark.parametrize("culprit", [Prints, Item, Branch, Nonzero, Constant, Raises])
def test_the_error_names_the_line_and_the_next_capture_works(culprit: type) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Inside(culprit()), (torch.randn(3, 2),))
    assert f"{__file__}:{_line(culprit)}" in str(caught.value)
    model, args = mlp()
    assert len(capture(model, args).nodes) > 10


def test_an_error_of_the_model_itself_is_quoted() -> None:
    with pytest.raises(CaptureError, match=r"must have same reduction dim, but got \[3, 2\] X \[7, 7\]"):
        capture(Raises(), (torch.randn(3, 2),))


def test_a_failed_capture_leaves_the_model_as_it_was() -> None:
    model = Inside(Item())
    before = dict(model.named_parameters())
    with pytest.raises(CaptureError):
        capture(model, (torch.randn(3, 2),))
    after = dict(model.named_parameters())
    assert all(after[name] is before[name] for name in before)
    assert type(model.linear.weight.detach()) is Tensor
    model(torch.ones(3, 2))


def test_arguments_that_the_model_does_not_take_are_a_capture_error() -> None:
    model, (x,) = mlp()
    with pytest.raises(CaptureError, match="MLP cannot be captured"):
        capture(model, (x, x, x))
