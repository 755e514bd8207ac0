"""Experts in a loop of which some do something else, or take no more than so many tokens, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plan
from ..thorough import some_thorough
from .as_before import check_as_before
from .test_expert_loops import EXPERTS, ROWS, SIZE, WORDS, Expert, Mixture

CAPACITY = 2


class Named(nn.ModuleDict):
    """Experts with a name each, as in the Switch Transformer of transformers."""

    def __init__(self) -> None:
        super().__init__({f"expert_{e}": Expert() for e in range(EXPERTS)})

    def forward(self, x: Tensor, hot: Tensor, weights: Tensor) -> Tensor:
        out, mask = torch.zeros_like(x), hot.permute(2, 1, 0)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            slot, token = torch.where(mask[e].squeeze(0))
            current = x[None, token].reshape(-1, SIZE)
            out.index_add_(0, token, (self[f"expert_{e[0]}"](current) * weights[token, slot, None]).to(x.dtype))
        return out


class Switch(nn.Module):
    """Of each row an expert takes the first tokens that have chosen it, so many of them."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        super().__init__()
        self.router, self.experts, self.capacity = nn.Linear(SIZE, EXPERTS), Named(), capacity

    def hot(self, scores: Tensor) -> Tensor:
        hot = F.one_hot(scores.argmax(-1), num_classes=EXPERTS)
        return hot * (torch.cumsum(hot, dim=-2) <= self.capacity)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        weights, hot = scores.max(-1).values.view(-1, 1), self.hot(scores).view(-1, 1, EXPERTS)
        return (self.experts(x.view(-1, SIZE), hot, weights).view_as(x) + x).square().mean()


class SwitchOfEvery(Switch):
    """Looks for experts with tokens before any are dropped."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, SIZE)
        scores = self.router(x).softmax(-1)
        hot = F.one_hot(scores.argmax(-1), num_classes=EXPERTS)
        kept, out = (hot * (hot.cumsum(0) <= CAPACITY)).T, torch.zeros_like(x)
        for e in hot.sum(0).nonzero().flatten():
            (token,) = torch.where(kept[e])
            out[token] += self.experts[f"expert_{e:d}"](x[token])
        return (out + x).square().mean()


def of_two_choices(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """All first choices go before all second ones."""
    hot, out = F.one_hot(c, EXPERTS), torch.zeros_like(x)
    hot = ((hot.transpose(0, 1).flatten(0, 1).cumsum(0) <= 7).view(2, -1, EXPERTS).transpose(0, 1)) * hot
    for e, expert in enumerate(m.experts):
        token, slot = torch.where(hot[..., e])
        out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
    return out


def returning(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """The last experts give back what they are given, as in LongCat-Flash; more rows than experts have matrices."""
    out, mask = torch.zeros_like(x), F.one_hot(c, num_classes=EXPERTS).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        e = int(e.item())
        slot, token = torch.where(mask[e].squeeze(0))
        if token.numel() == 0:
            continue
        current = x[token]
        made = current if e >= EXPERTS - 2 else F.silu(F.linear(current, m.stacked[e])) @ m.stacked[e].T
        out.index_add_(0, token, (made * w[token, slot, None]).to(x.dtype))
    return out


def of_two_kinds(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token = torch.where(c == e)[0]
        made = (
            m.experts[e].up(x[token]) if e < 2 else F.relu(expert(x[token])) @ m.stacked[e] @ m.experts[e].up.weight.T
        )
        out[token] += made[:, :SIZE] * s[token, e].unsqueeze(-1)
    return out


LOOPS = {each.__name__: each for each in (of_two_choices, returning, of_two_kinds)}
CASES = ["Switch", "SwitchOfEvery", *LOOPS]
OVER_THE_BATCH = {"SwitchOfEvery", "of_two_choices"}
"""Those that give an expert so many tokens of all rows, so that ``ddp`` would have to gather."""


def example(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    model = Mixture(LOOPS[name]) if name in LOOPS else {"Switch": Switch, "SwitchOfEvery": SwitchOfEvery}[name]()
    return model.double(), (torch.randn(ROWS, WORDS, SIZE, dtype=torch.float64),)


@pytest.mark.parametrize("name", CASES)
def test_experts_compute_their_own_tokens_alone(name: str) -> None:
    model, args = example(name)
    schemes = [] if name in OVER_THE_BATCH else ["baseline ddp"]
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=schemes)
    assert any("grouped_product" in entry.name for entry in plan.operators)
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-11, batch=(args[0].flip(0, 2),))


@pytest.mark.parametrize("name", some_thorough(CASES, OVER_THE_BATCH))
def test_whatever_is_cut(name: str) -> None:
    model, args = example(name)
    for seed in range(3):
        plan = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), seed, model, args, {})
        check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)


def test_a_capacity_drops_tokens() -> None:
    torch.manual_seed(0)
    model, x = Switch().double(), torch.randn(ROWS, WORDS, SIZE, dtype=torch.float64)
    tight = model(x)
    model.capacity = WORDS
    assert not torch.isclose(tight, model(x))


class Others(SwitchOfEvery):
    """Looks for experts among other tokens than it keeps."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, SIZE)
        hot, out = F.one_hot(self.router(x).argmax(-1), num_classes=EXPERTS), torch.zeros_like(x)
        kept, first = (hot * (hot.cumsum(0) <= CAPACITY)).T, hot * (hot.cumsum(0) <= 1)
        for e in (first * (x[:, :1] > 0)).sum(0).nonzero().flatten():
            (token,) = torch.where(kept[e])
            out[token] += self.experts[f"expert_{e:d}"](x[token])
        return (out + x).square().mean()


class Scaled(Switch):
    """What is not a number is not zero, so that every expert would have such a token."""

    def hot(self, scores: Tensor) -> Tensor:
        return F.one_hot(scores.argmax(-1), num_classes=EXPERTS) * scores.max(-1, keepdim=True).values


class Rewritten(Switch):
    """Drops some of those that were chosen once this was noted."""

    def hot(self, scores: Tensor) -> Tensor:
        chosen = scores.argmax(-1)
        hot = F.one_hot(chosen, num_classes=EXPERTS) * (scores[..., :1] > 0)
        chosen[:2] = 0
        return hot


class Logarithmic(Switch):
    """Of what an expert makes of dropped tokens the derivative may be infinite."""

    def forward(self, x: Tensor) -> Tensor:
        x, out = x.view(-1, SIZE), torch.zeros_like(x).view(-1, SIZE)
        hot = self.hot(self.router(x)[None])[0]
        for e in range(EXPERTS):
            (token,) = torch.where(hot[:, e])
            out[token] += self.experts[f"expert_{e}"](x[token]).square().log()
        return (out + x).square().mean()


@pytest.mark.parametrize("kind", [Others, Scaled, Rewritten, Logarithmic])
def test_what_is_not_known_to_be_the_same_is_refused(kind: type[Switch]) -> None:
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match=r"depends on (numbers|it)"):
        capture(kind().double(), (torch.randn(ROWS, WORDS, SIZE, dtype=torch.float64),))
