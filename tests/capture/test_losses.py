"""Losses are captured as sums and counts, so that a cut batch keeps its exact mean."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.capture import capture
from autoshard.capture.picked import of_rows
from autoshard.layout import Layout, S
from autoshard.mesh import Mesh
from autoshard.strategies import Enumerator

LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "bce with logits": F.binary_cross_entropy_with_logits,
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y),
    "cross entropy": lambda x, y: F.cross_entropy(x, y.argmax(1)),
}


class WithLoss(nn.Module):
    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.linear(x), y)


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_every_operator_on_rows_can_be_cut_by_rows(name: str, parts: int) -> None:
    """Also unevenly, and without a warning; so nothing of a loss divides by the length of its own shard.

    But for the broadcast of a scalar: DTensor offers it whole, and it moves nothing.
    """
    graph = capture(WithLoss(LOSSES[name]), (torch.rand(10, 8), torch.rand(10, 6)))
    enumerator = Enumerator(graph, Mesh(("dp",), (parts,)))
    rows = Layout((S(0),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for node in graph.nodes:
            strategies = enumerator.strategies(node)
            meta = node.outputs[0]
            broadcast = node.op is torch.ops.aten.expand.default
            if node.kind == "operator" and not broadcast and meta and meta.shape[:1] == (10,):
                assert any(strategy.outputs[0] == rows for strategy in strategies), node.name


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("shape", "rows", "op"),
    [
        ((6, 5), (6,), torch.ops.aten.nll_loss_backward.default),
        ((5,), (), torch.ops.aten.nll_loss_backward.default),
        ((0, 5), (0,), torch.ops.aten.nll_loss_backward.default),
        ((2, 5, 3, 4), (2, 3, 4), torch.ops.aten.nll_loss2d_backward.default),
    ],
)
@pytest.mark.parametrize("ignored", [-100, 2])
def test_the_gradient_of_what_is_picked_is_torchs(
    shape: tuple[int, ...],
    rows: tuple[int, ...],
    op: torch._ops.OpOverload,
    weighted: bool,
    reduction: int,
    ignored: int,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(shape, generator=generator), torch.randint(0, 5, rows, generator=generator)
    weight = torch.rand(5, generator=generator) if weighted else None
    gradient = torch.randn(rows if reduction == 0 else (), generator=generator)
    total = torch.tensor(3.5) if reduction == 1 else torch.tensor(0.0)
    args = gradient, x, target, weight, reduction, ignored, total
    torch.testing.assert_close(of_rows(op)(*args), op(*args))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_torch_accepts_the_gradient_of_what_is_picked(dim: int) -> None:
    """Schema, shapes without values, and no result that is an argument."""
    shape = [3, 4, 2]
    shape[dim] = 1
    args = torch.randn(shape), torch.randint(0, 5, shape), dim, 5
    torch.library.opcheck(
        torch.ops.autoshard.gather_backward.default, args, test_utils=("test_schema", "test_faketensor")
    )
