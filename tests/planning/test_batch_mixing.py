"""A scheme that cuts the batch, on a model that mixes it: the error names the operator, and what people do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.errors import InfeasibleError

from ..models import ConvNet


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(6, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.features(x) @ self.features(y).t(), torch.arange(len(x)))


class Scattered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_scatter(x > 0, self.features(x)).square().mean()


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize(
    ("model", "args", "message"),
    [
        (ConvNet(), (torch.ones(4, 3, 6, 6), torch.zeros(4, dtype=torch.int64)), r"norm/.*SyncBatchNorm"),
        (Contrastive(), (torch.ones(4, 6), torch.ones(4, 6)), r"/mm \(.*test_batch_mixing.py:22.* mixes its rows"),
        (Scattered(), (torch.ones(4, 6),), r"/masked_scatter .* has no rule by which it is cut"),
    ],
    ids=["batch norm", "contrastive", "no rule"],
)
def test_the_operator_that_mixes_the_batch_is_named(model: nn.Module, args: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(InfeasibleError, match=rf"'family dp=ddp' cuts the batch, but {message}"):
        autoshard.plan(model, args, mesh="dp=2", hardware="cpu-gloo", constraints=["baseline ddp"])
