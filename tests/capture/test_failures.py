"""Models that cannot be captured: the error names the line of the model, and the next capture works."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from autoshard.capture import capture, model_key
from autoshard.capture.lines import line_in
from autoshard.errors import CaptureError

from ..models import mlp


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()  # culprit
        return y + 1


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.full((2,), x.sum().item())  # culprit


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # culprit
            return x
        return -x


class Nonzero(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].max()  # culprit


class Constant(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tensor([1.0] * 20_000).sum()  # culprit


class SparseGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 2, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows((x > 0).long())  # culprit


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


@pytest.mark.parametrize("culprit", [Prints, Item, Branch, Nonzero, Constant, SparseGradient, Raises])
def test_the_error_names_the_line_and_the_next_capture_works(culprit: type) -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Inside(culprit()), (torch.randn(3, 2),))
    assert f"{__file__}:{_line(culprit)}" in str(caught.value)
    model, args = mlp()
    assert len(capture(model, args).nodes) > 10


def test_a_long_line_is_not_quoted_whole() -> None:
    said = "scores = self.head(x) * (" + " + ".join(["self.scale"] * 20) + ")"
    line = line_in(f'  File "/models/mine.py", line 7, in forward\n    {said}\n')
    assert line.startswith("/models/mine.py:7: scores = self.head(x) * (self.scale + ") and line.endswith("...")
    assert len(line) == len("/models/mine.py:7: ") + 100


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] != 7:
            raise ValueError("7 features, please")
        return x


class Lacks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing


class Asserts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 7, "7 features, please"
        return x


class Unnamed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + nothing  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("own", [Raises, Refuses, Lacks, Asserts, Unnamed])
def test_an_error_of_the_model_itself_is_quoted_alone(own: type, caplog: pytest.LogCaptureFixture) -> None:
    """As the model raises it by itself, without advice on capture, dynamo's traceback or torch's log of it."""
    if own is Asserts and torch.__version__ < "2.12":
        pytest.skip("dynamo of torch 2.11 cannot follow what pytest makes of an assertion")
    with pytest.raises(Exception) as alone:
        with torch.device("meta"):
            Inside(own()).to("meta")(torch.randn(3, 2))
    with suppress(Exception):  # a plan that is looked up on disk runs the model on fakes before
        model_key(Inside(own()), (torch.randn(3, 2),), {})
    with pytest.raises(CaptureError) as caught:
        capture(Inside(own()), (torch.randn(3, 2),))
    said = str(caught.value)
    assert type(alone.value).__name__ in said
    assert str(alone.value).splitlines()[0].rstrip(".") in said
    assert "graph break" not in said
    assert caught.value.__suppress_context__ and not caplog.records


def test_a_breaking_model_is_not_called_wrong() -> None:
    for culprit in (Prints, Item, Branch, Nonzero):
        with pytest.raises(CaptureError, match="cannot be captured as one graph"):
            capture(Inside(culprit()), (torch.randn(3, 2),))


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


class Cache:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys


class Returning(nn.Module):
    def __init__(self, body: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.ones(2)), body

    def forward(self, x: Tensor) -> Any:
        return self.body(self.weight, x)


def _left_out(weight: Tensor, x: Tensor) -> Tensor:
    chance = torch.rand([])
    if not (chance < 0.1):
        x = x * weight
    return x + weight


def _dropped(weight: Tensor, x: Tensor) -> Tensor:
    return x * weight if random.uniform(0, 1) < 0.5 else weight


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda weight, x: (x * weight, Cache(x)), r"an object of class Cache; .* use_cache=False, .*alone"),
        (lambda weight, x: torch.autograd.grad((x * weight).sum(), weight)[0], r"takes a gradient within the forward"),
        (
            lambda weight, x: pack_padded_sequence(x * weight, [2, 1, 1]).batch_sizes,
            r"an object of class PackedSequence",
        ),
        (lambda weight, x: pack_padded_sequence(x * weight, [2, 1, 1]), r"an object of class PackedSequence; return"),
        (lambda weight, x: (x * weight, x.dtype), r"neither a tensor nor a number .* return its name"),
        (lambda weight, x: weight + torch.rand(2, generator=torch.Generator()), r"a torch\.Generator\. Draw without"),
        (_left_out, r"number that is drawn .* decides which way .*test_failures.* config\.layerdrop = 0\.0"),
        (
            lambda weight, x: x * weight if torch.rand(1).item() < 0.5 else weight,
            r"number that is drawn .* draw outside and pass what decides",
        ),
        (_dropped, r"draws a random number in Python .*torch\.rand"),
        (lambda weight, x: x * weight * random.getrandbits(8), r"draws a random number in Python .*torch\.rand"),
        (lambda weight, x: x * weight * random.choice((1, 2)), r"draws a random number in Python .*torch\.rand"),
        (lambda weight, x: x * random.Random(3).getrandbits(8), r"draws a random number in Python .*torch\.rand"),
        (lambda weight, x: F.relu(x, inplace=True) * weight, r"writes into its argument x .* write x = x.clone\(\)"),
        (
            lambda weight, x: checkpoint(lambda y: y * weight, x, use_reentrant=True) + weight,
            r"a reentrant checkpoint .* train nothing in it; .* use_reentrant=False",
        ),
    ],
    ids=[
        "cache",
        "gradient",
        "packed",
        "packed result",
        "dtype",
        "generator",
        "layer drop",
        "number drawn",
        "random",
        "bits",
        "choice",
        "generator",
        "argument",
        "reentrant",
    ],
)
def test_what_is_not_supported_is_said_with_what_to_do(body: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Returning(body), (torch.randn(3, 2),))
