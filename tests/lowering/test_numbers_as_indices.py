"""Indices that numbers in tensors say: what they pick is looked up in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plan
from ..thorough import some_thorough
from .as_before import check_as_before

ROWS, WORDS, SIZE = 4, 6, 3
Body = Callable[[Tensor, Tensor, Tensor], Any]

READ: dict[str, Body] = {
    "a row": lambda w, x, t: w[t[0]],
    "of the largest": lambda w, x, t: w[t.max()],
    "from the end": lambda w, x, t: w[t[1] - WORDS],
    "a column": lambda w, x, t: w[:, t[0] % SIZE].sum() * x[0, 0],
    "the last words": lambda w, x, t: torch.stack([x[i, t[i] - 1] for i in range(ROWS)]).sum(0),
    "of an iterator": lambda w, x, t: torch.stack([w[k] for k in t]).sum(0),
    "taken out": lambda w, x, t: w[t[0].item()] * w[int(t[1]) % 2],
    "taken out of rows": lambda w, x, t: torch.stack([x[i, int(n) - 1] for i, n in enumerate(t)]).sum(0),
    "two": lambda w, x, t: w[t[0], t[1] % SIZE] * w[0],
    "two apart": lambda w, x, t: x[t[0] % ROWS, :, t[1] % SIZE].sum() * w[0],
    "behind dots": lambda w, x, t: x[..., t[1] % SIZE].sum() * w[0],
    "beside new dims": lambda w, x, t: w[None, t[1], None].sum((0, 1)),
    "beside numbers and ranges": lambda w, x, t: x[1:3, t[0], -1].sum() * w[1],
    "in a checkpoint": lambda w, x, t: checkpoint(lambda a: a[t[0]] * a[t[1]], w, use_reentrant=False),
    "short": lambda w, x, t: w[t[0].to(torch.int8)] + w[t[1].int()],
    "after a write": lambda w, x, t: (w * 1).mul_(2)[t[0]],
}


def _a_row(y: Tensor, w: Tensor, x: Tensor, t: Tensor) -> None:
    y[t[0]] = w[0]


def _elements(y: Tensor, w: Tensor, x: Tensor, t: Tensor) -> None:
    for i in range(ROWS):
        y[i, t[i] % SIZE] = x[i, 0, 0]


def _a_column(y: Tensor, w: Tensor, x: Tensor, t: Tensor) -> None:
    y[:, t[0] % SIZE] = w[:, 1]


def _sums(y: Tensor, w: Tensor, x: Tensor, t: Tensor) -> None:
    y[t[0]] += w[1]
    y[t[1]] *= 3.0
    y[t[0]] -= y[t[2]]


def _taken_out(y: Tensor, w: Tensor, x: Tensor, t: Tensor) -> None:
    y[t[0].item()] = w[1]


def _put_back(y: Tensor, w: Tensor, x: Tensor, t: Tensor) -> None:
    row = y[t[0]].clone()
    row += w[0]
    y[t[1]] = row


WRITTEN = {each.__name__.strip("_"): each for each in (_a_row, _elements, _a_column, _sums, _taken_out, _put_back)}


def _into_the_row(y: Tensor, w: Tensor, x: Tensor, t: Tensor) -> None:
    y[t[0]].add_(w[0])


def _into_a_view_of_it(y: Tensor, w: Tensor, x: Tensor, t: Tensor) -> None:
    y[t[0]][1:] = 5.0


def _read_afterwards(y: Tensor, w: Tensor, x: Tensor, t: Tensor) -> None:
    row = y[t[0]]
    y.add_(w)
    y.mul_(row.sum())


def _a_sum_that_is_read(y: Tensor, w: Tensor, x: Tensor, t: Tensor) -> None:
    row = y[t[0]]
    row += w[0]
    y[t[1]] = row


def _a_sum_in_between(y: Tensor, w: Tensor, x: Tensor, t: Tensor) -> None:
    row = y[t[0]]
    row += w[0]
    total = y.sum()
    y[t[0]] = row
    y.mul_(total)


REFUSED = {
    _into_the_row: "it is written into",
    _into_a_view_of_it: "it is written into",
    _read_afterwards: "it is read after that was written into of which it is a part",
    _a_sum_that_is_read: "it is written into",
    _a_sum_in_between: "it is written into",
}


def reading(body: Body) -> Callable[..., Tensor]:
    return lambda w, x, t: (x * body(w, x, t)).square().mean()


def writing(body: Callable[..., None]) -> Callable[..., Tensor]:
    def written(w: Tensor, x: Tensor, t: Tensor) -> Tensor:
        y = w.new_ones(WORDS, SIZE)
        body(y, w, x, t)
        return (x * y).square().mean() + y[0].sum()

    return written


class Model(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.table, self.head, self.body = nn.Parameter(torch.randn(WORDS, SIZE)), nn.Linear(SIZE, SIZE), body

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.body(self.table, self.head(x), t)


def example(body: Callable[..., Tensor]) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Model(body).double(), (torch.randn(ROWS, WORDS, SIZE, dtype=torch.float64), torch.tensor([2, 4, 1, 5]))


BODIES = {**{name: reading(body) for name, body in READ.items()}, **{k: writing(body) for k, body in WRITTEN.items()}}
ALIKE = {"of the largest", "a column", "behind dots", "short", "elements", "a_row"}


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize("name", some_thorough(BODIES, ALIKE))
def test_what_is_picked_or_written_is_that_of_one_process(name: str) -> None:
    model, args = example(BODIES[name])
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"], cache=False)
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["the last words", "two apart", "sums"])
def test_whatever_is_cut(name: str) -> None:
    model, args = example(BODIES[name])
    plan = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), 0, model, args, {})
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__.strip("_"))
def test_a_view_that_would_change_is_refused(body: Any) -> None:
    model, args = example(writing(body))
    with pytest.raises(CaptureError, match=REFUSED[body]) as refused:
        capture(model, args)
    assert __file__ in str(refused.value)


def test_other_numbers_pick_other_rows() -> None:
    """What is picked stands nowhere in the graph: it goes by the numbers of each step."""
    model, (x, t) = example(BODIES["the last words"])
    plan = autoshard.plan(model, (x, t), mesh="a=2", hardware="cpu-gloo", cache=False)
    check_as_before(model, (x, t.flip(0)), plan, rtol=1e-8, atol=1e-10)


def test_numbers_that_are_known_pick_a_view() -> None:
    def body(w: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return torch.stack([w[k] for k in torch.arange(3)]).sum() * w[t[0]].sum()

    model, args = example(body)
    ops = [node.op for node in capture(model, args).nodes]
    assert ops.count(torch.ops.aten.index.Tensor) == 1
