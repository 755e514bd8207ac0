"""Under ``torch.amp.GradScaler`` all ranks leave out the steps that one process leaves out, whichever rank holds what
has overflowed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard.capture import capture

from ..fuzz.judge import capturing_once
from ..fuzz.ranks import run_ranks
from ..plans_of import profile_of
from .sessions import full

PINS = ("whole=dp:R tp:R", "rows=dp:S(0) tp:R", "columns=dp:R tp:S(1)", "uneven=dp:S(0) tp:R")
SESSIONS: dict[str, tuple[Callable[[Iterable[nn.Parameter]], optim.Optimizer], bool]] = {
    "SGD": (partial(optim.SGD, lr=0.1), False),
    "SGD on lists, clipped": (partial(optim.SGD, lr=0.1, momentum=0.9, foreach=True), True),
    "fused SGD": (partial(optim.SGD, lr=0.1, momentum=0.9, fused=True), False),
    "fused AdamW": (partial(optim.AdamW, lr=0.1, fused=True), False),
    "fused AdamW, clipped": (partial(optim.AdamW, lr=0.1, fused=True), True),
}
"""An optimizer, and whether gradients are unscaled and clipped before the step."""
OF_ONE_PROCESS = SESSIONS | {"fused SGD": (partial(optim.SGD, lr=0.1, momentum=0.9), False)}
"""Torch's own fused SGD goes on from memory that nothing was written into where its first step was left out."""
OVERFLOWS = ("rows", None, "columns", "uneven", None)
"""The parameter whose last gradient is infinite in each step."""


class Sums(nn.Module):
    """The gradient of each parameter is the argument beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.ones(()))
        self.rows, self.columns, self.uneven = (nn.Parameter(torch.ones(n, 4)) for n in (4, 4, 3))

    def forward(self, rows: Tensor, columns: Tensor, uneven: Tensor) -> Tensor:
        return self.whole + (self.rows * rows).sum() + (self.columns * columns).sum() + (self.uneven * uneven).sum()


def gradients(overflows: str | None) -> tuple[Tensor, ...]:
    found = {"rows": torch.ones(4, 4), "columns": torch.ones(4, 4), "uneven": torch.ones(3, 4)}
    if overflows is not None:
        found[overflows][-1, -1] = torch.inf
    return tuple(found.values())


def trained(model: nn.Module, cut: Callable[..., Any], make: Callable[..., optim.Optimizer], clips: bool) -> list[Any]:
    """The scale and the parameters after every step."""
    optimizer, scaler = make(model.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    seen: list[Any] = []
    for overflows in OVERFLOWS:
        scaler.scale(model(*cut(*gradients(overflows)))).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.get_scale(), [full(p).detach().clone() for p in model.parameters()]))
    return seen


def test_what_overflows_on_one_rank_stops_the_step_on_all() -> None:
    args = gradients(None)
    plan = autoshard.plan(Sums(), args, mesh="dp=2,tp=2", hardware=profile_of("slow"), pins=PINS, cache=False)
    models = [Sums() for _ in range(plan.mesh.size)]

    def one(rank: int) -> list[list[Any]]:
        mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axes)
        parallel = autoshard.parallelize(models[rank], plan, mesh)
        cut = partial(autoshard.shard_inputs, plan, mesh)
        return [trained(copy.deepcopy(parallel), cut, *session) for session in SESSIONS.values()]

    expected = [trained(Sums(), lambda *a: a, *session) for session in OF_ONE_PROCESS.values()]
    with capturing_once(capture(Sums(), args, guarded=True)):
        results = run_ranks(plan.mesh.size, one)
    for found in results:
        if isinstance(found, BaseException):
            raise found
        for name, ours, theirs in zip(SESSIONS, found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
