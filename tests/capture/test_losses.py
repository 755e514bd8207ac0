"""Losses are captured as sums and counts, so that a cut batch keeps its exact mean."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoshard.capture import capture
from autoshard.capture.by_numbers.unvalidated import gaussian_nll_loss
from autoshard.capture.operators.margins import multilabel_margin_loss
from autoshard.capture.operators.picked import of_rows
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
    "soft margin": lambda x, y: F.soft_margin_loss(x, y.sign()),
    "gaussian": lambda x, y: F.gaussian_nll_loss(x, y, x.exp()),
    "cross entropy": lambda x, y: F.cross_entropy(x, y.argmax(1)),
    "margins of several classes": lambda x, y: F.multilabel_margin_loss(x, y.argsort(1)),
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


@pytest.mark.parametrize("name", LOSSES)
def test_the_lines_of_a_loss_are_those_of_the_model(name: str) -> None:
    graph = capture(WithLoss(LOSSES[name]), (torch.rand(10, 8), torch.rand(10, 6)))
    assert all(node.source.startswith(f"{__file__}:") for _, node in graph.of_kind("operator"))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(4, 6), (4, 1), (4,), None])
def test_the_gaussian_loss_is_torchs(shape: tuple[int, ...] | None, reduction: str, full: bool) -> None:
    """With its gradients, where a variance is below what it is clamped to as well."""
    torch.manual_seed(0)
    leaves = torch.randn(4, 6), torch.randn(4, 6), torch.rand(shape or ()) + 0.5
    with torch.no_grad():
        leaves[2].flatten()[0] = 1e-9
    found, expected = (
        _value_and_gradients(loss, leaves if shape else (*leaves[:2], 0.5), full, 1e-6, reduction)
        for loss in (gaussian_nll_loss, F.gaussian_nll_loss)
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for wrong in ((3,), (2, 6), (4, 6, 1)):
        with pytest.raises(ValueError, match="var is of incorrect size"):
            gaussian_nll_loss(*leaves[:2], torch.ones(wrong))
    with pytest.raises(ValueError, match="negative"):
        gaussian_nll_loss(*leaves[:2], -0.5)
    assert (
        inspect.signature(gaussian_nll_loss).parameters.keys()
        == inspect.signature(F.gaussian_nll_loss).parameters.keys()
    )
    assert gaussian_nll_loss.__defaults__ == F.gaussian_nll_loss.__defaults__
    with pytest.raises(ValueError, match="not valid"):
        gaussian_nll_loss(*leaves[:2], 0.5, reduction="most")


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [4, None])
def test_the_margins_of_several_classes_are_torchs(rows: int | None, reduction: str) -> None:
    """Of none, some and all classes, behind the first -1 of which others may stand, and named twice."""
    targets = torch.tensor([[3, 1, -1, 0, 2], [-1, 4, 4, 4, 4], [0, 1, 2, 3, 4], [2, 2, -1, -1, -1]])
    scores = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    for k in range(4):
        x, y = (scores, targets) if rows else (scores[k], targets[k])
        found, expected = (
            _value_and_gradients(lambda x, loss=loss, y=y: loss(x, y, reduction=reduction), (x,))
            for loss in (multilabel_margin_loss, F.multilabel_margin_loss)
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    legacy = {"size_average": False}
    assert multilabel_margin_loss(scores, targets, **legacy) == multilabel_margin_loss(scores, targets, reduction="sum")
    for wrong in (targets[:2], targets[0]):
        with pytest.raises(ValueError, match="inconsistent target size"):
            multilabel_margin_loss(scores, wrong)
    with pytest.raises(ValueError, match="not a valid value"):
        multilabel_margin_loss(scores, targets, reduction="most")


def _value_and_gradients(
    loss: Callable[..., torch.Tensor], given: tuple[torch.Tensor | float, ...], *options: Any
) -> list[torch.Tensor]:
    leaves = [each.clone().requires_grad_() for each in given if isinstance(each, torch.Tensor)]
    value = loss(*leaves, *given[len(leaves) :], *options)
    return [value.detach(), *torch.autograd.grad(value.sum(), leaves)]


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
