"""What layers have in whole under a scheme that cuts them, and what they need not have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.errors import ConstraintError, StrategyWarning

from ..lowering.as_before import check_as_before
from .test_lone_matrices import WIDTH, Pair

HEADS = 4


class Product(nn.Module):
    """A layer whose weight is the product of two parameters."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(columns, 4)), nn.Parameter(torch.randn(4, rows))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.first @ self.second)


class OfProducts(nn.Module):
    """Pairs of these, and, where there are others ``also``, of layers that have a parameter for a weight."""

    def __init__(self, also: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(2 + 2 * also))
        for layer in self.layers[-2:]:
            layer.up, layer.down = Product(WIDTH, 2 * WIDTH), Product(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("also", [True, False])
def test_weights_that_are_computed_and_cut_as_no_parameter_are_said(also: bool) -> None:
    model, args, asked = OfProducts(also), (torch.randn(4, 6, WIDTH),), ["family tp=tp"]
    said = pytest.warns(
        StrategyWarning, match=r"the weight of layers.2.up/mm.*F.linear.* and of 3 more is computed of "
    )
    if not also:
        said = pytest.raises(ConstraintError, match=r"that of layers.0.up/mm.*F.linear.* and of 3 more is computed of ")
    with said:
        autoshard.plan(model, args, mesh="tp=2", hardware="cpu-gloo", constraints=asked, cache=False)


class Layer(nn.Module):
    """Attention that a function computes of queries, keys and values, (N, T, WIDTH) each, and a layer up and down.
    There are no norms, so that what passes between layers can be cut along its features.
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.attend, self.up, self.down = attend, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(self.q(x), self.k(x), self.v(x)))
        return x + self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Mean(nn.Module):
    """A loss."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def folded(x: Tensor) -> Tensor:
    """Heads of (N, T, WIDTH) as rows."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1)


def of_some_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries that are picked in each row, as in Informer."""
    q, k, v = folded(q), folded(k), folded(v)
    rows, largest = torch.arange(len(q))[:, None], q.sum(-1).topk(3).indices
    mixed = torch.bmm(torch.bmm(q[rows, largest], k.transpose(1, 2)).softmax(-1), v).mean(1, keepdim=True) + v
    return mixed.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)


def test_attention_that_no_plan_has_cut_is_said() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Layer(of_some_queries), Layer(of_some_queries), Mean())
    said = r"cuts attention by heads, but every rank computes all of 0/\w+ \(.*q\[rows, largest\].*\): something"
    with pytest.warns(StrategyWarning, match=said):
        autoshard.plan(model, (torch.randn(4, 6, WIDTH),), mesh="tp=2", constraints=["family tp=tp"], cache=False)


class OfEquations(nn.Module):
    """Attention whose matrices have heads as a dim of their own, as in XLNet."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Parameter(torch.randn(WIDTH, HEADS, 4)) for _ in range(4))
        self.norm, self.pair = nn.LayerNorm(WIDTH), Pair()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bth,hnd->btnd", self.norm(x), each) for each in (self.q, self.k, self.v))
        seen = torch.einsum("bind,bjnd->bnij", q, k).softmax(-1)
        mixed = torch.einsum("bnij,bjnd->bind", seen, v)
        return self.pair(x + torch.einsum("bind,hnd->bih", mixed, self.out))  # type: ignore[no-any-return]


def test_a_matrix_of_three_dims_is_cut_by_heads() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OfEquations(), OfEquations(), Mean()).double()
    args = (torch.randn(4, 6, WIDTH, dtype=torch.float64),)
    plan = autoshard.plan(model, args, mesh="tp=2", hardware="cpu-gloo", constraints=["family tp=tp"], cache=False)
    cut = {entry.name: str(entry.layout[0]) for entry in plan.parameters if entry.name[2:] in ("q", "k", "v", "out")}
    assert cut == {f"{layer}.{name}": "S(1)" for layer in (0, 1) for name in ("q", "k", "v", "out")}
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-12)


class OfImages(nn.Module):
    """Attention of some heads to an image of fewer points, as in SegFormer."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fewer, self.heads, self.pair = nn.Conv2d(WIDTH, WIDTH, 2, 2), heads, Pair()

    def forward(self, x: Tensor) -> Tensor:
        image = x.transpose(1, 2).view(len(x), WIDTH, 4, 4)
        fewer = self.fewer(image).flatten(2).transpose(1, 2)
        made = ((self.q, x), (self.k, fewer), (self.v, fewer))
        q, k, v = (each(given).unflatten(-1, (self.heads, -1)).transpose(1, 2) for each, given in made)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.pair(x + self.out(mixed))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*has no other to go with:autoshard.errors.StrategyWarning")
def test_rows_of_an_image_are_no_heads() -> None:
    """In a layer of one head, which nobody can share."""
    torch.manual_seed(0)
    model = nn.Sequential(OfImages(1), OfImages(2), Mean()).double()
    args = (torch.randn(4, 16, WIDTH, dtype=torch.float64),)
    plan = autoshard.plan(model, args, mesh="tp=2", hardware="cpu-gloo", constraints=["family tp=tp"], cache=False)
    heads = {e.name: str(e.inputs[0][0]) for e in plan.operators if e.name.endswith("/attention")}
    assert heads["1/attention"] == "S(1)" != heads["0/attention"]
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-12)
