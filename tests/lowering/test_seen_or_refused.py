"""Programs that go by numbers in ways that are easily missed: each is refused, or computed as by one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.errors import CaptureError

from ..thorough import some_thorough
from .as_before import check_as_before

ROWS, SIZE, EXPERTS = 12, 4, 3


class Model(nn.Module):
    """(rows, features) to a number, by a mask of rows, classes, a choice of two experts for each row, and weights."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body, self.enter, self.router = body, nn.Linear(SIZE, SIZE), nn.Linear(SIZE, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(EXPERTS))
        self.table, self.norm = nn.Embedding(6, SIZE), nn.LayerNorm(SIZE)
        self.register_buffer("mean", torch.zeros(SIZE))
        self.register_buffer("var", torch.ones(SIZE))

    def forward(self, x: Tensor, mask: Tensor, classes: Tensor) -> Tensor:
        h = self.enter(x)
        weights, chosen = self.router(h).softmax(-1).topk(2, -1)
        return self.body(self, h, mask, classes, chosen, weights)


def example(body: Callable[..., Tensor], seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(0)
    model = Model(body).double()
    torch.manual_seed(seed)
    mask = torch.rand(ROWS) < (0.6, 0.2, 0.9)[seed]
    mask[seed] = True
    x = torch.randn(ROWS, SIZE, dtype=torch.float64)
    if seed == 2:  # rows that are alike, so that one expert has none
        x = x[:1].repeat(ROWS, 1)
    return model, (x, mask, torch.randint(6, (ROWS,)))


BODIES: dict[str, Callable[..., Tensor]] = {}


def _body(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """One of the programs."""
    BODIES[function.__name__] = function
    return function


def _mixed(m: Any, x: Tensor, c: Tensor, w: Tensor, out: Tensor | None = None, go: Any = None) -> Tensor:
    """A loop over experts; ``go`` does something in each turn."""
    out = torch.zeros_like(x) if out is None else out
    for e in range(EXPERTS):
        token, slot = torch.where(c == e)
        if token.shape[0] == 0:
            continue
        made = m.experts[e](x[token]) * w[token, slot, None]
        out.index_add_(0, token, made if go is None else go(e, token, slot, made))
    return out


@_body
def rows_in_place(m, x, k, t, c, w):
    rows = x[k]
    rows.mul_(2)
    return rows.square().mean()


@_body
def rows_by_inplace(m, x, k, t, c, w):
    rows = x[k]
    F.relu(rows, inplace=True)
    return rows.square().mean()


@_body
def part_of_rows(m, x, k, t, c, w):
    rows = x[k]
    rows[..., 1:].mul_(0.5)
    return rows.square().mean()


@_body
def labels_in_place(m, x, k, t, c, w):
    labels = t[k]
    labels.clamp_(max=2)
    return F.cross_entropy(x[k], labels)


@_body
def write_of_an_unused_pick(m, x, k, t, c, w):
    h = x * 1
    h.mul_(2)[k]
    return h.square().mean()


@_body
def statistics_of_an_unused_pick(m, x, k, t, c, w):
    F.batch_norm(x, m.mean, m.var, training=True)[k]
    return (x + m.mean).square().mean()


@_body
def write_in_a_check(m, x, k, t, c, w):
    h = x * 1
    torch._check_tensor_all(h.clamp_(max=0.1) <= 1)
    return h.sum()


@_body
def mask_written_later(m, x, k, t, c, w):
    keep = k.clone()
    rows = x.detach()[keep]
    keep.ravel()[::2] = False
    return (rows * 2).sum() + x[keep].sum()


@_body
def mask_by_xor(m, x, k, t, c, w):
    keep = k.clone()
    rows = x.detach()[keep]
    keep ^= x[:, 0] > 0
    return (rows.square()).sum() + x[keep].sum()


@_body
def legacy_loss(m, x, k, t, c, w):
    return F.mse_loss(x[k], x.tanh()[k], reduce=False).sum()


@_body
def legacy_loss_by_class(m, x, k, t, c, w):
    return F.cross_entropy(m.experts[0](x)[k], (t % SIZE)[k], reduce=False).mean()


@_body
def embedding_by_frequency(m, x, k, t, c, w):
    return F.embedding(t[k], m.table.weight, scale_grad_by_freq=True).square().sum() + x.sum()


@_body
def norm_without_eps(m, x, k, t, c, w):
    return F.layer_norm(x[k], (SIZE,), m.norm.weight, m.norm.bias, 0.0).square().mean()


@_body
def drawn_twice(m, x, k, t, c, w):
    return (x[torch.randperm(ROWS) < 6] * x[torch.randperm(ROWS) < 6]).square().sum()


@_body
def without_gradient_in_the_loop(m, x, k, t, c, w):
    def gate(e, token, slot, made):
        with torch.no_grad():
            factor = w[token, slot, None] * 2
        return made * factor

    return _mixed(m, x, c, w, go=gate).square().mean()


@_body
def autocast_in_the_loop(m, x, k, t, c, w):
    def cast(e, token, slot, made):
        with torch.autocast("cpu", torch.bfloat16):
            again = F.linear(x[token].float(), m.experts[e].weight.float())
        return made + again.double()

    return _mixed(m, x, c, w, go=cast).square().mean()


@_body
def an_iterator_in_a_list(m, x, k, t, c, w):
    numbers = [iter(range(1, 9))]

    def count(e, token, slot, made):
        next(numbers[0])
        return made

    return _mixed(m, x, c, w, go=count).square().mean() * next(numbers[0])


@_body
def modulo_of_a_count(m, x, k, t, c, w):
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, slot = torch.where(c == e)
        if token.shape[0] % ROWS == 0:
            continue
        out.index_add_(0, token, m.experts[e](x[token]) * w[token, slot, None])
    return (out + x).square().mean()


@_body
def the_shape_of_a_local_tensor(m, x, k, t, c, w):
    out, state, n = torch.zeros_like(x), torch.zeros(1), 0
    for e in range(EXPERTS):
        token, slot = torch.where(c == e)
        state = torch.zeros(1)
        if token.shape[0] > 0:
            out.index_add_(0, token, m.experts[e](x[token]) * w[token, slot, None])
            state = torch.zeros(2)
        n += state.shape[0]
    return out.square().mean() * n


@_body
def a_sum_that_is_old(m, x, k, t, c, w):
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows = (c == e).any(-1)
        before = out[rows]
        out[rows] = before + m.experts[e](x[rows])
        out[rows] = before + x[rows]
    return out.square().mean()


@_body
def a_sum_that_is_the_input(m, x, k, t, c, w):
    h = x * 1
    return _mixed(m, h, c, w, out=h.double()).square().mean()


@_body
def a_sum_that_is_dropped_out(m, x, k, t, c, w):
    h = x * 1
    return _mixed(m, h, c, w, out=F.dropout(h, 0.0)).square().mean()


@_body
def the_input_in_place(m, x, k, t, c, w):
    h = x.detach() * 1

    def change(e, token, slot, made):
        F.silu(h, inplace=True)
        return made

    return _mixed(m, h, c, w, go=change).square().mean() + x.sum()


@_body
def statistics_in_the_loop(m, x, k, t, c, w):
    def note(e, token, slot, made):
        F.batch_norm(x, m.mean, m.var, training=True)
        return made + m.mean

    return _mixed(m, x, c, w, go=note).square().mean()


@_body
def at_most_as_many(m, x, k, t, c, w):
    return _mixed(m, x, c, w, go=lambda e, token, slot, made: (made * 100).clamp(-1e9, token.numel())).sum()


@_body
def a_column_of_ones(m, x, k, t, c, w):
    hot, out = F.one_hot(m.router(x).argmax(-1), EXPERTS), torch.zeros_like(x)
    for e in range(EXPERTS):
        out.index_add_(0, hot[:, e], m.experts[e](x[hot[:, e]]))
    return out.square().mean() + x[k].sum()


@_body
def dropout_of_nothing_is_its_input(m, x, k, t, c, w):
    h = x * 1
    kept = F.dropout(h, 0.3, training=False)
    kept += 1
    also = F.alpha_dropout(h, 0.0, True)
    also.mul_(2)
    return (kept * h).sum()


@_body
def a_buffer_that_is_not_dropped(m, x, k, t, c, w):
    kept = torch.dropout(m.mean, 0.0, True)
    kept.add_(1)
    return (x * m.mean).square().sum()


@_body
def chunks_that_are_said_to_be_none(m, x, k, t, c, w):
    h = x.detach() * 1
    torch.unsafe_chunk(h, 2, 0)[0].mul_(2)
    h.unsafe_split(4)[1].add_(1)
    return (h * x).square().sum()


ALIKE = {"part_of_rows", "mask_by_xor", "legacy_loss_by_class", "a_sum_that_is_dropped_out", "labels_in_place"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", some_thorough(BODIES, ALIKE))
def test_it_is_refused_or_right(name: str) -> None:
    model, args = example(BODIES[name])
    try:
        plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"], cache=False)
    except CaptureError:
        return
    for seed in range(3):
        check_as_before(model, args, plan, rtol=1e-8, atol=1e-10, batch=example(BODIES[name], seed)[1])


def test_such_loops_and_rows_without_more_are_captured() -> None:
    """The law would hold of a planner that refuses everything."""
    for body in (
        lambda m, x, k, t, c, w: _mixed(m, x, c, w).square().mean(),
        lambda m, x, k, t, c, w: x[k].square().mean() + F.cross_entropy(x[k], (t % SIZE)[k]),
    ):
        model, args = example(body)
        plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"], cache=False)
        check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
