"""What one process draws depends on how its tensors lie in memory, and is drawn again whatever lies there in a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import autoshard
from autoshard.errors import StrategyWarning

from ..one_process import one_rank

SEED = 3
X = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self, body: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.line = body, nn.Linear(8, 8)
        self.conv = nn.Conv2d(4, 4, 1).to(memory_format=torch.channels_last)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.line(x))


def _images(x: Tensor) -> Tensor:
    return x.view(6, 4, 4, 2).to(memory_format=torch.channels_last)


BODIES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "plain": lambda m, x: F.dropout(x, 0.4),
    "transposed": lambda m, x: F.dropout(x.transpose(0, 2), 0.4),
    "transposed and added": lambda m, x: F.dropout(x.permute(1, 2, 0) + 1, 0.4),
    "part of a row": lambda m, x: F.dropout(x[:, 1:3, ::2], 0.4),
    "repeated": lambda m, x: F.dropout(x.sum(1, keepdim=True).expand(6, 4, 8), 0.4),
    "channels last": lambda m, x: F.dropout(m.conv(_images(x)), 0.4),
    "channels": lambda m, x: F.dropout2d(m.conv(_images(x)), 0.4),
    "alpha": lambda m, x: F.alpha_dropout(x.mT, 0.4, True) + F.feature_alpha_dropout(x, 0.4, True).mT,
    "all of it": lambda m, x: F.dropout(x, 1.0) + F.dropout(x, 0.4),
    "attention": lambda m, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4),
    "attention of heads": lambda m, x: F.scaled_dot_product_attention(
        *(x.unflatten(-1, (2, 4)).mT,) * 3, dropout_p=0.4
    ),
    "recurrent": lambda m, x: m.lstm(x)[0],
    "layer": lambda m, x: m.layer(x),
    "noise": lambda m, x: x.mT + torch.randn_like(x.mT) + torch.rand_like(x.mT) * torch.randn(8, 4),
    "in place": lambda m, x: x.mT * torch.empty_like(x.mT).uniform_() + torch.empty_like(x.mT).normal_(),
    "chosen": lambda m, x: F.gumbel_softmax(x.mT, hard=True) * x.mT,
    "given": lambda m, x: torch.normal(x.detach().mT) * x.mT + torch.bernoulli(x.detach().sigmoid().mT),
    "leaky": lambda m, x: F.rrelu(x.mT, training=True),
    "picked": lambda m, x: x[torch.multinomial(x[0].softmax(-1).mT, 2).flatten() % 6],
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with one_rank() as made:
        yield made


@pytest.mark.filterwarnings(f"ignore::{StrategyWarning.__module__}.StrategyWarning")
def test_what_draws_by_the_values_of_others_runs_whole() -> None:
    options: dict[str, Any] = {"mesh": "a=2", "hardware": "cpu-gloo", "cache": False}
    plan = autoshard.plan(Model(BODIES["leaky"]), (X,), **options, pins=["x=a:S(0)"])
    (drawn,) = (entry for entry in plan.operators if "rrelu" in entry.name and entry.phase == "forward")
    assert drawn.outputs[0].is_replicated


@pytest.mark.filterwarnings(f"ignore::{StrategyWarning.__module__}.StrategyWarning")
@pytest.mark.parametrize("name", BODIES)
def test_the_numbers_are_those_of_the_model_itself(name: str, mesh: DeviceMesh) -> None:
    model = Model(BODIES[name])
    torch.manual_seed(SEED)
    parallel = autoshard.auto_parallelize(deepcopy(model), mesh, (X,), random="as-one-process")
    for step in range(2):
        torch.manual_seed(SEED + step)
        expected = model(X)
        found = parallel(X)
        for made in (expected, found):
            made.square().mean().backward()
        torch.testing.assert_close(found.full_tensor(), expected)
    torch.testing.assert_close(parallel.line.weight.grad.full_tensor(), model.line.weight.grad)
