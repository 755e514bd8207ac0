"""Buffers, odd inputs and changed attributes on real processes, under plans that cut tensors."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

import autoshard
from autoshard.errors import PlanMismatchError

from . import cases
from .harness import caught, run_ranks
from .parity import device_mesh_of, full

MESH = "dp=2"


class Net(nn.Module):
    """A linear layer that keeps running means: one replaced, one written in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 4)
        self.gain = 1.0
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("total", torch.zeros(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.linear(x) * self.gain
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        with torch.no_grad():
            self.total += x.sum(0) + y.sum(0)
        return (hidden * self.mean).square().mean() + self.linear(y).square().mean()


class Joined(nn.Module):
    """Takes rows that may be none at all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.linear = nn.Linear(6, 4)
        self.more = nn.Parameter(torch.randn(0, 4))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        return torch.cat([self.linear(x), self.linear(rows), self.more]).square().mean()


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Made = tuple[Callable[[], nn.Module], tuple[Tensor, ...], list[tuple[Tensor, ...]]]

X = numbers(8, 6, seed=0)
MODELS: dict[str, Made] = {
    "buffers, from one tensor given twice": (Net, (X, X), [(X, X), (X, X + 1), (2 * X, X)]),
    "no rows": (Joined, (X, X[:0]), [(X, X[:0]), (3 * X, X[:0])]),
}
PINS = {
    "buffers, from one tensor given twice": ["x=dp:S(0)", "y=dp:S(0)", "linear.weight=dp:S(0)"],
    "no rows": ["x=dp:S(0)"],
}


def plan_of(what: str) -> str:
    make, args, _ = MODELS[what]
    return autoshard.dump_plan(autoshard.plan(make(), args, mesh=MESH, hardware=cases.slow_machine(), pins=PINS[what]))


def _worst(texts: dict[str, str]) -> dict[str, float]:
    """The largest difference in losses, gradients and buffers from one process, by model."""
    worst = {}
    for what, text in texts.items():
        plan = autoshard.parse_plan(text)
        mesh = device_mesh_of(plan)
        make, _, batches = MODELS[what]
        reference = make()
        parallel: Any = autoshard.parallelize(deepcopy(reference), plan, mesh)
        found = 0.0
        for batch in batches:
            losses = parallel(*autoshard.shard_inputs(plan, mesh, *batch)), reference(*batch)
            for loss in losses:
                loss.backward()
            pairs = [losses, *zip(parallel.buffers(), reference.buffers())]
            pairs += [(p.grad, q.grad) for p, q in zip(parallel.parameters(), reference.parameters())]
            found = max([found, *(float((full(a) - b).abs().max()) for a, b in pairs if b.numel())])
        worst[what] = found
    return worst


def test_buffers_and_inputs_without_elements_are_those_of_one_process() -> None:
    texts = {what: plan_of(what) for what in MODELS}
    assert any("S(0)" in str(line) for line in texts["no rows"].splitlines())
    for worst in run_ranks(2, _worst, texts):
        assert worst.keys() == MODELS.keys() and max(worst.values()) <= 1e-5, worst


def _changed(text: str) -> tuple[str, str]:
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    make, args, _ = MODELS["buffers, from one tensor given twice"]
    parallel: Any = autoshard.parallelize(make(), plan, mesh)
    shards = autoshard.shard_inputs(plan, mesh, *args)
    parallel.gain = 2.0
    error = caught(lambda: parallel(*shards))
    parallel.gain = 1.0
    parallel(*shards).backward()
    return error


def test_an_attribute_that_changed_is_an_error_on_every_rank_and_not_a_hang() -> None:
    for kind, text in run_ranks(2, _changed, plan_of("buffers, from one tensor given twice")):
        assert kind == PlanMismatchError.__name__ and "model.gain == 1.0" in text
