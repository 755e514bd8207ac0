"""Attention to windows that ``as_strided`` cuts, as Longformer has it, against one process on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plan
from .as_before import check_as_before

HEADS, WINDOW = 2, 2


class Windowed(nn.Module):
    """Each chunk of queries attends to the chunks around it; steps may come first, as Longformer has them."""

    def __init__(self, steps_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps_first = steps_first
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, 8) to ()."""
        x = x.transpose(0, 1) if self.steps_first else x
        q, k, v = (self._heads(layer(x)) for layer in (self.queries, self.keys, self.values))
        scores = torch.einsum("bcxd,bcyd->bcxy", self._chunks(q), self._chunks(k)).softmax(-1)
        windows = self._around(v)[:, 1:]
        found = torch.einsum("bcxy,bcyd->bcxd", scores, windows[:, : scores.shape[1], : scores.shape[-1]])
        return found.square().mean()

    def _heads(self, x: Tensor) -> Tensor:
        x = x.view(*x.shape[:2], HEADS, -1)
        x = (x.transpose(0, 1) if self.steps_first else x).transpose(1, 2)
        return x.reshape(-1, *x.shape[2:])

    def _chunks(self, x: Tensor) -> Tensor:
        """As Longformer's ``_chunk``."""
        x = x.view(x.size(0), x.size(1) // (2 * WINDOW), 2 * WINDOW, x.size(2))
        size, stride = list(x.size()), list(x.stride())
        size[1], stride[1] = size[1] * 2 - 1, stride[1] // 2
        return x.as_strided(size=size, stride=stride)

    def _around(self, x: Tensor) -> Tensor:
        """As Longformer cuts the values."""
        padded = F.pad(x, (0, 0, WINDOW, WINDOW), value=-1)
        size = (x.shape[0], x.shape[1] // WINDOW, 3 * WINDOW, x.shape[2])
        first, row, one = padded.stride()
        return padded.as_strided(size=size, stride=(first, WINDOW * row, row, one))


@pytest.mark.parametrize("steps_first", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_windows_are_what_they_are_in_one_process(steps_first: bool) -> None:
    model: Any = Windowed(steps_first).double()
    args = (torch.randn(4, 12, 8, dtype=torch.float64),)
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"])
    graph = capture(model, args)
    assert [node.op for node in graph.nodes].count(torch.ops.aten.unfold.default) == 3
    drawn = [random_plan(graph, Mesh.parse("a=2,b=2"), seed, model, args, {}) for seed in range(2)]
    for each in (plan, *drawn):
        check_as_before(model, args, each, rtol=1e-8, atol=1e-10)
