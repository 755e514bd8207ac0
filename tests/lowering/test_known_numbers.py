"""Forwards that go by numbers which stand in them, against one process, on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from threading import RLock
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.capture.operators.constant import LARGEST
from autoshard.errors import CaptureError
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plan
from ..thorough import some_thorough
from .as_before import check_as_before

LENGTHS = ((1, 2), (2, 2))
"""Rows and columns of two pictures."""


def taken_apart(x: Tensor) -> Tensor:
    lengths = (torch.tensor(LENGTHS, device=x.device).prod(-1) + torch.tensor([0, 2])).tolist()
    return torch.cat([part.softmax(-1) for part in x.split(lengths, 1)], 1)


def windows(x: Tensor) -> Tensor:
    """As the vision tower of Qwen2.5-VL finds its windows, of one size but those at the edges."""
    order, ends = [], [0]
    for height, width in torch.tensor(LENGTHS).tolist():
        number = F.pad(torch.arange(height * width).view(height, width), (0, 1, 0, 3 - height), value=-100)
        number = number.view(3, -1).flatten()
        order.append(number[number != -100] + ends[-1])
        ends.extend((torch.tensor([height * width]).cumsum(0) + ends[-1]).tolist())
    ends = torch.unique_consecutive(torch.tensor(ends, dtype=torch.int32))
    lengths = (ends[1:] - ends[:-1]).tolist()
    moved = x[:, : sum(lengths)][:, torch.cat(order)]
    return torch.cat([part.cumsum(1) for part in moved.split(lengths, 1)], 1)


def counted(x: Tensor) -> Tensor:
    kinds = torch.tensor([0, 2, 2, 5])
    return x[:, : torch.unique(kinds).numel()] * kinds.bincount().amax() + x[:, kinds.max() : 6]


def masked(x: Tensor) -> Tensor:
    mask = torch.tensor([True, False, True, False, False, True, False, False])
    chosen = x[:, mask] * torch.arange(1.0, 4.0).to(x)[torch.tensor([True, True, True])]
    return chosen + x[:, (~mask).nonzero().squeeze(1)][:, :3]


def repeated(x: Tensor) -> Tensor:
    return x.repeat_interleave(torch.tensor([1, 0, 2, 1, 1, 1, 0, 3]), 1)


def branched(x: Tensor) -> Tensor:
    numbers = torch.tensor(LENGTHS)
    x = x.exp() if (numbers > 1).all() else x.tanh()
    return x if not numbers.sum() > 6 else x.cos()


def written(x: Tensor) -> Tensor:
    """Numbers that change as the forward runs, some of them by the batch."""
    numbers = torch.tensor([1.0, 2.0]).to(x)
    numbers.mul_(x.mean())
    places = torch.tensor([0, 3])
    places.add_(1)
    return x[:, places[0].item() : places[1].item()] * numbers[0] * numbers[1]


def in_numpy(x: Tensor) -> Tensor:
    """As BigBird counts the blocks that it picks at random."""
    sizes = [1, 2, 2]
    start = int(np.sum(sizes[:2]))
    for _ in range(1, np.array(sizes)[0] + 2):
        x = x.tanh()
    return x[:, start : np.max([6, start])] * np.array(sizes).max().item() / np.sqrt(x.shape[-1])


def larger(x: Tensor) -> Tensor:
    """A mask that is too large to be written down, which picks as many of each row."""
    x = x.repeat(1, 513)
    every_third = torch.arange(x.shape[1]).expand(*x.shape) % 3 == 0
    assert every_third.numel() > LARGEST
    return x[every_third].view(len(x), -1).logsumexp(1)


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    *(taken_apart, windows, counted, masked, repeated, branched, written, in_numpy, larger),
]


class Around(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.enter, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.enter(x)).square().mean()


def _example(function: Callable[[Tensor], Tensor]) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Around(function).double(), (torch.randn(4, 8, dtype=torch.float64),)


@pytest.mark.parametrize("function", some_thorough(FUNCTIONS, [windows]))
def test_a_forward_may_go_by_numbers_that_stand_in_it(function: Callable[[Tensor], Tensor]) -> None:
    model, args = _example(function)
    graph = capture(model, args)
    tags = {tag for node in graph.nodes if node.op for tag in node.op.tags}
    assert torch.Tag.data_dependent_output not in tags
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"])
    for each in (plan, random_plan(graph, Mesh.parse("a=2,b=2"), 0, model, args, {})):
        check_as_before(model, args, each, rtol=1e-8, atol=1e-10)


def test_numbers_of_the_batch_are_unknown_as_before() -> None:
    def mixed(x: Tensor) -> Tensor:
        numbers = torch.tensor([0, 1])
        numbers.add_((x > 0).sum())
        return x[:, : int(numbers[0])]

    with pytest.raises(CaptureError, match="takes a number out of a tensor"):
        capture(*_example(mixed))


def test_what_is_kept_under_a_lock_at_the_first_call_is_found() -> None:
    class Held:
        lock = RLock()

        @cached_property
        def scale(self) -> float:
            with self.lock:
                return 3.0

    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.held = nn.Linear(8, 8), Held()

        def forward(self, x: Tensor) -> Tensor:
            return self.enter(x).mean() * self.held.scale

    model: Any = Locked().double()
    args = (torch.randn(4, 8, dtype=torch.float64),)
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"])
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
