"""Models that work on (steps, rows, features): their batch is no block of the rows of a matrix that torch would make.

On simulated ranks, in double precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plan
from ..thorough import some_thorough
from .as_before import check_as_before

ROWS, STEPS, WIDTH, WORDS = 4, 6, 8, 12


class Words(nn.Module):
    """A language model of torch's own layers, as they are without ``batch_first``; what differs is asked for."""

    def __init__(self, folds: Callable[[Tensor], Tensor] = lambda x: x.reshape(-1)) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0), 2, enable_nested_tensor=False
        )
        self.folds = folds

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.head(self.layers(self.table(tokens).transpose(0, 1)))
        return F.cross_entropy(y.view(-1, WORDS), self.folds(tokens.t()), ignore_index=3)


class Equations(nn.Module):
    """Attention of XLNet, which is written in equations, with positions that are repeated for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(WIDTH, 2, 4)) for _ in range(4))
        self.r = nn.Parameter(torch.randn(WIDTH, 2, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.table(tokens).transpose(0, 1).contiguous()
        q, k, v = (torch.einsum("ibh,hnd->ibnd", h, weight) for weight in (self.q, self.k, self.v))
        angles = torch.arange(STEPS, dtype=h.dtype)[:, None] / torch.arange(1, 1 + WIDTH)
        r = torch.einsum("ibh,hnd->ibnd", angles.sin()[:, None].expand(-1, tokens.shape[0], -1), self.r)
        scores = torch.einsum("ibnd,jbnd->bnij", q, k) + torch.einsum("ibnd,jbnd->bnij", q, r)
        out = torch.einsum("hnd,ibnd->ibh", self.o, torch.einsum("bnij,jbnd->ibnd", scores.softmax(-1), v))
        return (out @ self.table.weight.t()).logsumexp(-1).square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "words": Words,
    "words, flattened": lambda: Words(torch.flatten),
    "equations": Equations,
}


def _example(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return MODELS[name]().double(), (torch.randint(0, WORDS, (ROWS, STEPS)),)


@pytest.mark.parametrize(
    ("mesh", "baseline"),
    some_thorough([("a=4", "ddp"), ("a=2", "fsdp"), ("a=2,b=2", "fsdp+tp")], [("a=4", "ddp"), ("a=2", "fsdp")]),
)
@pytest.mark.parametrize("name", MODELS)
def test_the_batch_is_cut_and_nothing_is_sent_for_it(name: str, mesh: str, baseline: str) -> None:
    model, args = _example(name)
    given: dict[str, Any] = {"mesh": mesh, "hardware": "cpu-gloo", "cache": False}
    plan = autoshard.plan(model, args, constraints=[f"baseline {baseline}"], **given)
    products = [entry for entry in plan.operators if entry.name.rpartition("/")[2].startswith("linear")]
    assert products and all(str(entry.inputs[0][0]) == "S(1)" for entry in products)
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("seed", some_thorough(range(3), (1, 2)))
@pytest.mark.parametrize("name", some_thorough(["words", "equations"], ["words"]))
def test_whatever_is_cut(name: str, seed: int) -> None:
    model, args = _example(name)
    plan = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), seed, model, args, {})
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 4))


class Product(nn.Module):
    """One product, as it is asked for."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.body = nn.Parameter(torch.randn(WIDTH, WIDTH)), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.weight).square().mean()


@pytest.mark.parametrize(
    ("body", "is_kept"),
    [
        (lambda x, w: F.linear(x.transpose(0, 1), w), True),
        (lambda x, w: F.linear(input=x.transpose(0, 1), weight=w), False),
        (lambda x, w: x.transpose(0, 1) @ w, True),
        (lambda x, w: x.transpose(0, 1).matmul(w), True),
        (lambda x, w: x[None].transpose(1, 2) @ w, False),
        (lambda x, w: F.linear(x, w), False),
        (lambda x, w: x.transpose(0, 1) @ w[0], False),
        (lambda x, w: F.linear(x.transpose(0, 1), w[0]), False),
        (lambda x, w: (x.transpose(0, 1).to(torch.complex128) @ torch.complex(w, 2 * w)).abs(), False),
        (lambda x, w: torch.einsum("ibh, hk -> kib", x.transpose(0, 1), w), True),
        (lambda x, w: torch.einsum("ibh,hk", x.transpose(0, 1), w), True),
        (lambda x, w: torch.einsum("ibh,hk->kb", x.transpose(0, 1), w), False),
        (lambda x, w: torch.einsum("...h,hk->...k", x.transpose(0, 1), w), True),
        (lambda x, w: torch.einsum("ibnd,jnd->ijbn", _heads(x.transpose(0, 1)), _heads(w)), True),
        (lambda x, w: torch.einsum("bind,jnd->ijbn", _heads(x), _heads(w)), False),
        (lambda x, w: torch.einsum("ibh,bk->ibhk", x.transpose(0, 1), w[:ROWS]), False),
        (lambda x, w: torch.einsum("ibh,hh->ibh", x.transpose(0, 1), w), False),
    ],
)
def test_what_is_no_such_product_stays_as_it_is(body: Callable[[Tensor, Tensor], Tensor], is_kept: bool) -> None:
    torch.manual_seed(0)
    model, args = Product(body).double(), (torch.randn(ROWS, STEPS, WIDTH, dtype=torch.float64),)
    names = {node.name for _, node in capture(model, args).of_kind("operator")}
    assert bool(names & {"/linear", "/linear_of_each"}) == is_kept
    given: dict[str, Any] = {"mesh": "a=2", "hardware": "cpu-gloo", "cache": False}
    given |= {"constraints": ["baseline ddp"]} if is_kept else {}  # which would warn of what it gathers
    check_as_before(model, args, autoshard.plan(model, args, **given), rtol=1e-8, atol=1e-10)
