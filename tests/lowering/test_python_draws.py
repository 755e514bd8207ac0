"""Layers that are dropped with a probability of nothing, against one process, and under a plan that says so."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.errors import PlanMismatchError
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plan
from ..one_process import one_rank
from .as_before import check_as_before


class Dropping(nn.Module):
    """Layers that are dropped, as in MusicGen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.layerdrop = nn.ModuleList(nn.Linear(8, 8) for _ in range(9)), 0.0

    def forward(self, x: Tensor) -> Tensor:
        """(B, 8) to ()."""
        for layer in self.layers:
            drawn = random.uniform(0, 1)
            if self.training and (drawn < self.layerdrop):
                continue
            x = layer(x).tanh()
        return x.square().mean()


def test_no_layer_is_dropped() -> None:
    model, args = Dropping(), (torch.randn(4, 8),)
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"])
    drawn = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), 0, model, args, {})
    for each in (plan, drawn):
        check_as_before(model, args, each, rtol=1e-4, atol=1e-6)


def test_a_step_draws_nothing_and_is_refused_once_layers_are_dropped() -> None:
    with one_rank() as mesh:
        parallel: Any = autoshard.auto_parallelize(Dropping(), mesh, (torch.randn(4, 8),))
        before = random.getstate()
        parallel(torch.randn(4, 8)).backward()
        assert random.getstate() == before
        parallel.layerdrop = 0.1
        with pytest.raises(PlanMismatchError, match=r"`model.layerdrop == 0.0` \(read at .*test_python_draws.py:\d+"):
            parallel(torch.randn(4, 8))
