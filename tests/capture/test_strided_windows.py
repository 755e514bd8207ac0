"""``as_strided`` that cuts windows is known for what it cuts; any other is none."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import capture
from autoshard.capture.taken_apart.strided_windows import Windows, cut, windows_of
from autoshard.errors import CaptureError

SHAPES = [(7,), (8,), (2, 8), (8, 3), (2, 9, 3), (1, 8, 3), (2, 1, 6, 4)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_windows_in_any_order_of_dims_are_found(shape: tuple[int, ...]) -> None:
    x = torch.arange(math.prod(shape)).reshape(shape)
    for dim, length, step in itertools.product(range(len(shape)), range(2, 7), range(1, 6)):
        if step >= length or length + step > shape[dim]:
            continue
        windows = x.unfold(dim, length, step)
        for order in itertools.permutations(range(windows.dim())):
            wanted = windows.permute(order)
            found = windows_of(x.numel(), tuple(wanted.shape), wanted.stride())
            assert found is not None and torch.equal(cut(x, range(x.dim()), *found), wanted)


def test_what_is_found_has_the_elements_that_the_strides_name() -> None:
    draw = random.Random(0)
    found = 0
    for _ in range(20000):
        count, dims = draw.choice([6, 8, 12, 16, 24]), draw.randint(1, 3)
        size = tuple(draw.randint(1, 5) for _ in range(dims))
        stride = tuple(draw.choice([0, 1, 2, 3, 4, 6, 8, 12]) for _ in range(dims))
        windows = windows_of(count, size, stride)
        if windows is not None:
            found += 1
            x = torch.arange(count)
            assert torch.equal(cut(x, [0], *windows), x.as_strided(size, stride))
    assert found > 20


@pytest.mark.parametrize(
    ("size", "stride"),
    [
        ((3, 2), (4, 1)),  # windows with room between them
        ((4, 3), (3, 1)),  # windows side by side
        ((2, 4), (2, 1)),  # not all windows
        ((12,), (1,)),
        ((3, 3), (1, 1)),  # a Hankel matrix of a part
        ((4, 12), (0, 1)),  # repeated
        ((3, 4), (1, 3)),  # turned
        ((0, 4), (2, 1)),
    ],
)
def test_other_strides_are_no_windows(size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    assert windows_of(12, size, stride) is None


def test_windows_are_those_of_longformer() -> None:
    x = torch.randn(2, 3, 8, 5)  # chunks of 8, which overlap by 4
    stride = (x.stride(0), x.stride(1) // 2, *x.stride()[2:])
    assert windows_of(x.numel(), (2, 5, 8, 5), stride) == Windows((2, 24, 5), 1, 8, 4, (0, 1, 3, 2), (2, 5, 8, 5))


class Cutting(nn.Module):
    """A linear layer, of whose result, or of the input, windows are cut."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8, 4) to ()."""
        y = self.linear(x)
        size, stride = (x.shape[0], 3, 4, 4), (32, 8, 4, 1)
        match self.kind:
            case "made":
                y = y.as_strided(size, stride)
            case "named":
                y = torch.as_strided(y, size=size, stride=stride, storage_offset=0)
            case "one":
                y = y.as_strided((x.shape[0], 1, 8, 4), (32, 32, 4, 1))
            case "shifted":
                y = y.as_strided((x.shape[0], 2, 4, 4), stride, 4)
            case "moved":
                y = y.transpose(0, 1).as_strided(size, stride)
            case "of numbers":
                y = y.as_strided((x.shape[0], torch.div(8, 2, rounding_mode="trunc") - 1, 4, 4), stride)
            case "part":
                y = y[:, 1:].as_strided((x.shape[0] - 1, 3, 4, 4), stride)
            case "input":
                y = y.sum() * x.as_strided(size, stride)
            case "weight":
                y = y.sum() * self.linear.weight.as_strided((3, 2, 4), (4, 4, 1))
            case "gaps":
                y = y[..., :2].as_strided((x.shape[0], 3, 4, 2), stride)
        return y.square().mean()


@pytest.mark.parametrize("kind", ["made", "named", "moved", "of numbers"])
def test_windows_of_what_is_made_are_captured(kind: str) -> None:
    graph = capture(Cutting(kind), (torch.randn(3, 8, 4),))
    ops = [node.op for node in graph.nodes]
    assert torch.ops.aten.unfold.default in ops and torch.ops.aten.unfold_backward.default in ops


def test_one_window_is_the_tensor_in_another_shape() -> None:
    graph = capture(Cutting("one"), (torch.randn(3, 8, 4),))
    assert {torch.ops.aten.unfold.default, torch.ops.aten.as_strided.default}.isdisjoint(
        node.op for node in graph.nodes
    )


@pytest.mark.parametrize("kind", ["shifted", "part", "input", "weight", "gaps"])
def test_windows_of_what_may_lie_otherwise_are_refused(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"as_strided.* reads memory as one process lays it out"):
        capture(Cutting(kind), (torch.randn(3, 8, 4),))
