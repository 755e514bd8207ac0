"""Experts in a loop, each of which picks its tokens, against one process, on simulated ranks."""

from __future__ import annotations

from collections.abc import Callable

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

ROWS, WORDS, SIZE, HIDDEN, EXPERTS, CHOICES = 8, 4, 6, 10, 4, 2
Loop = Callable[["Mixture", Tensor, Tensor, Tensor, Tensor], Tensor]


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(SIZE, HIDDEN), nn.Linear(SIZE, HIDDEN, bias=False)
        self.down, self.scale = nn.Linear(HIDDEN, SIZE), nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)) * self.gate(x)) * self.scale


class Mixture(nn.Module):
    """A router in front of a loop over experts, which takes tokens, scores (tokens, experts), weights and choices."""

    def __init__(self, loop: Loop, flat: bool = True) -> None:
        super().__init__()
        self.router, self.loop, self.flat = nn.Linear(SIZE, EXPERTS, bias=False), loop, flat
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.stacked = nn.Parameter(torch.randn(EXPERTS, SIZE, SIZE))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, SIZE) if self.flat else x
        scores = self.router(tokens).softmax(-1)
        weights, chosen = scores.topk(CHOICES, dim=-1)
        return (self.loop(self, tokens, scores, weights, chosen) + tokens).square().mean()


def mixtral(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """As transformers had it."""
    w, out = w / w.sum(-1, keepdim=True), torch.zeros_like(x)
    mask = F.one_hot(c, num_classes=EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(m.experts):
        slot, token = torch.where(mask[e])
        if token.shape[0] == 0:
            continue
        current = x[None, token].reshape(-1, SIZE)
        out.index_add_(0, token, (expert(current) * w[token, slot, None]).to(x.dtype))
    return out


def deepseek(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """As DeepSeek's own code has it."""
    out, counts = torch.zeros_like(x), torch.bincount(c.flatten(), minlength=EXPERTS).tolist()
    for e in range(EXPERTS):
        if counts[e] == 0:
            continue
        token, slot = torch.where(c == e)
        out[token] += m.experts[e](x[token]) * w[token, slot, None]
    return out


def tutorial(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """As makeMoE has it, of (rows, words, features)."""
    out, flat, scores = torch.zeros_like(x), x.view(-1, SIZE), s.view(-1, EXPERTS)
    for e, expert in enumerate(m.experts):
        mask = (c == e).any(dim=-1)
        flat_mask = mask.view(-1)
        if flat_mask.any():
            made = expert(flat[flat_mask]) * scores[flat_mask, e].unsqueeze(1)
            out[mask] += made.squeeze(1)
    return out


def summed_weights(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = c == e
        rows = mask.any(-1)
        if rows.sum() > 0:
            out[rows] += expert(x[rows]) * (w * mask).sum(-1)[rows].unsqueeze(-1)
    return out


def without_a_condition(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, slot = torch.nonzero(c == e, as_tuple=True)
        out.index_add_(0, token, torch.tanh(m.experts[e](x[token])) * w[token, slot].unsqueeze(-1) * 2 + x[token])
    return out


def of_one_choice(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    best, out = s.argmax(-1), torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        mask = best == e
        if not mask.any():
            continue
        out[mask] = out[mask] + expert(x[mask]) * s[mask, e : e + 1]
    return out


def of_matrices(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, slot = torch.where(c == e)
        both = x[token] @ m.stacked[e]
        made = both[..., ::2].relu() * both[:, 1::2]
        out.index_add_(0, token, made @ m.stacked[e, : SIZE // 2] * w[token, slot, None])
    return out


def shared(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, slot = torch.where(c == e)
        out.index_add_(0, token, m.experts[0](x[token]) * w[token, slot, None])
    return out


def over_found(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """Over the experts that have tokens, as transformers 4.57 has it."""
    out, mask = torch.zeros_like(x), F.one_hot(c, num_classes=EXPERTS).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        expert = m.experts[e]
        slot, token = torch.where(mask[e].squeeze(0))
        current = x[None, token].reshape(-1, SIZE)
        out.index_add_(0, token, (expert(current) * w[token, slot, None]).to(x.dtype))
    return out


def over_found_of_matrices(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """As transformers 5 has it."""
    out = torch.zeros_like(x)
    with torch.no_grad():
        mask = F.one_hot(c, num_classes=EXPERTS).permute(2, 1, 0)
        found = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for e in found:
        e = e[0]
        if e == EXPERTS:
            continue
        slot, token = torch.where(mask[e])
        up, gate = F.linear(x[token], torch.cat([m.stacked, m.stacked], 1)[e]).chunk(2, dim=-1)
        made = F.linear(F.silu(gate) * up, m.stacked[e]) * w[token, slot, None]
        out.index_add_(0, token, made.to(out.dtype))
    return out


def over_different(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in torch.unique(c):
        token, slot = torch.where(c == e)
        out[token] += m.experts[e](x[token]) * w[token, slot, None]
    return out


def over_counts(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in torch.bincount(c.flatten(), minlength=EXPERTS).nonzero().flatten():
        token, slot = torch.where(c == int(e))
        out[token] += m.experts[e.item()](x[token]) * w[token, slot, None]
    return out


def over_parts(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """As DBRX has it: matrices one below the other, places without gradients, one class more than there are experts."""
    out, joined = torch.zeros_like(x), m.stacked.flatten(0, 1)
    mask = F.one_hot(c, num_classes=EXPERTS + 1).permute(2, 1, 0)
    for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        e = e[0]
        with torch.no_grad():
            slot, token = torch.where(mask[e])
        up, down = joined.view(-1, SIZE, SIZE)[e], joined.view(-1, SIZE, SIZE)[e]
        made = F.silu(x[token].matmul(up.T)).matmul(down)
        out.index_add_(0, token, made * w[token, slot, None])
    return out


def without_gradients(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """Places without gradients, an expert after the other, where dtypes stay as they are."""
    out = torch.zeros_like(x)
    with torch.autocast("cpu", enabled=False):
        for e, expert in enumerate(m.experts):
            with torch.no_grad():
                token, slot = torch.where(c == e)
            out.index_add_(0, token, expert(x[token]) * w[token, slot, None])
    return out


LOOPS = {
    each.__name__: each
    for each in (mixtral, deepseek, tutorial, summed_weights, without_a_condition, of_one_choice, of_matrices, shared)
    + (over_found, over_found_of_matrices, over_different, over_counts, over_parts, without_gradients)
}


def example(loop: Loop) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Mixture(loop, loop is not tutorial).double(), (torch.randn(ROWS, WORDS, SIZE, dtype=torch.float64),)


ALIKE = {"shared", "summed_weights", "without_a_condition", "over_counts", "without_gradients"}
"""Loops that are looked at in `make test-all`: of each, another one is much like it."""


@pytest.mark.parametrize("name", some_thorough(LOOPS, ALIKE))
def test_experts_compute_their_own_tokens_alone(name: str) -> None:
    model, args = example(LOOPS[name])
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline ddp"])
    assert name == "shared" or any("grouped_product" in entry.name for entry in plan.operators)
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-11, batch=(args[0].flip(0, 2),))


@pytest.mark.parametrize("name", some_thorough(LOOPS, LOOPS.keys() - {"tutorial"}))
def test_whatever_is_cut(name: str) -> None:
    model, args = example(LOOPS[name])
    for seed in range(2):
        plan = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), seed, model, args, {})
        check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)


def of_rows(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """Choices of as many tokens, which need not be distinct, as if they were of one."""
    best, first = s.argmax(-1).view(-1, WORDS), x[:ROWS]
    out = torch.zeros_like(first)
    for e, expert in enumerate(m.experts):
        rows = (best == e).any(-1)
        out[rows] += expert(first[rows])
    return x * out.mean()


def widening(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """A part of another size for each expert."""
    out = torch.zeros_like(x)
    for e, (expert, mask) in enumerate(zip(m.experts, _masks(c))):
        out[mask] += expert(x[mask]) * x[mask][:, : e + 1].sum(-1, keepdim=True)
    return out


@pytest.mark.parametrize("loop", [of_rows, widening])
def test_what_masks_add_that_is_of_no_experts_is_computed_of_all_rows(loop: Loop) -> None:
    model, args = example(loop)
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo")
    assert not any("grouped_product" in entry.name for entry in plan.operators)
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-11, batch=(args[0].flip(0, 2),))


def counted(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """Python counts the experts that have tokens."""
    out, busy = torch.zeros_like(x), 0
    for e, expert in enumerate(m.experts):
        mask = (c == e).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            busy += 1
    return out / busy


def listed(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out, sizes = torch.zeros_like(x), []
    for e, expert in enumerate(m.experts):
        mask = (c == e).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            sizes.append(1.0)
    return out * len(sizes)


def enclosed(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out, busy = torch.zeros_like(x), 0

    def note() -> None:
        nonlocal busy
        busy += 1

    for e, expert in enumerate(m.experts):
        mask = (c == e).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            note()
    return out / busy


def replaced(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out, busy = torch.zeros_like(x), [0.0] * EXPERTS
    for e, expert in enumerate(m.experts):
        mask = (c == e).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            busy[e] = 1.0
    return out / sum(busy)


def renamed(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """A name stands for another tensor that was there."""
    out, result = torch.zeros_like(x), x
    for e, expert in enumerate(m.experts):
        mask = (c == e).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            result = s
    return out + result.mean()


def beside(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """What is done for an expert with tokens, and not to these."""
    out, total = torch.zeros_like(x), x.mean()
    for e, expert in enumerate(m.experts):
        mask = (c == e).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            total = total * 2
    return out + total


def read_meanwhile(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """An expert that takes what those before it made."""
    out = x.clone()
    for e, expert in enumerate(m.experts):
        token, slot = torch.where(c == e)
        out.index_add_(0, token, expert(out[token]) * w[token, slot, None])
    return out


def some_experts(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """Those of the last expert are left out."""
    out = torch.zeros_like(x)
    for e in range(EXPERTS - 1):
        token, slot = torch.where(c == e)
        out.index_add_(0, token, m.experts[e](x[token]).cumsum(0) * w[token, slot, None])
    return out


def mixed_tokens(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, slot = torch.where(c == e)
        made = expert(x[token])
        out.index_add_(0, token, (made - made.mean(0)) * w[token, slot, None])
    return out


def unlike(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, slot = torch.where(c == e)
        made = expert(x[token])
        out.index_add_(0, token, (made.tanh() if e == 2 else made.relu()) * w[token, slot, None])
    return out


def perhaps_twice(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """Choices that need not be distinct: what is written twice counts once."""
    c, out = torch.stack([c[:, 0], c.flip(0)[:, 0]], 1), torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, slot = torch.where(c == e)
        out[token] += expert(x[token]) * w[token, slot, None]
    return out


def scaled_sum(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """What is added counts twice."""
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, slot = torch.where(c == e)
        out.index_add_(0, token, expert(x[token]) * w[token, slot, None], alpha=2)
    return out


def in_another_order(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """Weights of choices first, of tokens in their order."""
    out, hot = torch.zeros_like(x), F.one_hot(c, num_classes=EXPERTS).permute(2, 1, 0)
    for e, expert in enumerate(m.experts):
        slot, token = torch.where(hot[e])
        mask = (c == e).any(-1)
        out[mask] += expert(x[mask]) * w[token, slot, None]
    return out


def written_beside(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out, total = torch.zeros_like(x), x.mean(0).clone()
    for e, expert in enumerate(m.experts):
        mask = (c == e).any(-1)
        if mask.any():
            out[mask] += expert(x[mask])
            total += 1
    return out + total


def dropped(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        token, slot = torch.where(c == e)
        out.index_add_(0, token, m.drop(expert(x[token])) * w[token, slot, None])
    return out


def _made(m: Mixture, x: Tensor, masks: list[Tensor]) -> Tensor:
    out = torch.zeros_like(x)
    for mask, expert in zip(masks, m.experts):
        if mask.any():
            out[mask] += expert(x[mask])
    return out


def _masks(c: Tensor) -> list[Tensor]:
    return [(c == e).any(-1) for e in range(EXPERTS)]


def comprehended(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    masks = _masks(c)
    return _made(m, x, masks) / len([1 for mask in masks if mask.any()])


def generated(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    masks = _masks(c)
    return _made(m, x, masks) / sum(1 for mask in masks if mask.any())


def noted_elsewhere(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """In a list that a function within has."""
    out, busy = torch.zeros_like(x), []

    def note() -> None:
        busy.append(1.0)

    for expert, mask in zip(m.experts, _masks(c)):
        if mask.any():
            out[mask] += expert(x[mask])
            note()
    return out / len(busy)


def in_an_inner_list(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out, busy = torch.zeros_like(x), [[]]
    for expert, mask in zip(m.experts, _masks(c)):
        if mask.any():
            out[mask] += expert(x[mask])
            busy[0].append(1.0)
    return out / len(busy[0])


def advanced(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """An iterator."""
    out, numbers = torch.zeros_like(x), iter(range(1, 9))
    for expert, mask in zip(m.experts, _masks(c)):
        if mask.any():
            out[mask] += expert(x[mask])
            next(numbers)
    return out / next(numbers)


def over_and_counted(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out, busy = torch.zeros_like(x), 0
    for e in torch.unique(c):
        token, slot = torch.where(c == e)
        out[token] += m.experts[e](x[token]) * w[token, slot, None]
        busy += 1
    return out / busy


def the_last_found(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in torch.unique(c):
        token, slot = torch.where(c == e)
        out[token] += m.experts[e](x[token]) * w[token, slot, None]
    return out * (e + 1)


def over_and_beside(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out, total = torch.zeros_like(x), x.mean()
    for e in torch.unique(c):
        token, slot = torch.where(c == e)
        out[token] += m.experts[e](x[token]) * w[token, slot, None]
        total = total * 2
    return out + total


def numbered(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for k, e in enumerate(torch.unique(c)):
        token, slot = torch.where(c == e)
        out[token] += m.experts[e](x[token]) * w[token, slot, None] * (k + 1)
    return out


def left_early(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in torch.unique(c):
        token, slot = torch.where(c == e)
        out[token] += m.experts[e](x[token]) * w[token, slot, None]
        if e == 2:
            break
    return out


def over_those_of_some(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    """What is found in the choices of some tokens, of all."""
    out, some = torch.zeros_like(x), F.one_hot(c[:3], num_classes=EXPERTS).sum(dim=(0, 1))
    for e in some.nonzero():
        token, slot = torch.where(c == e)
        out[token] += m.experts[e](x[token]) * w[token, slot, None]
    return out


def over_those_of_many(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in (torch.bincount(c.flatten(), minlength=EXPERTS) > 2).nonzero():
        token, slot = torch.where(c == e)
        out[token] += m.experts[e](x[token]) * w[token, slot, None]
    return out


def weighed_without_gradients(m: Mixture, x: Tensor, s: Tensor, w: Tensor, c: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, expert in enumerate(m.experts):
        with torch.no_grad():
            token, slot = torch.where(c == e)
            scale = w[token, slot, None]
        out.index_add_(0, token, expert(x[token]) * scale)
    return out


REFUSED = (
    weighed_without_gradients,
    comprehended,
    generated,
    noted_elsewhere,
    in_an_inner_list,
    advanced,
    over_and_counted,
    the_last_found,
    over_and_beside,
    numbered,
    left_early,
    over_those_of_some,
    over_those_of_many,
    renamed,
    scaled_sum,
    in_another_order,
    written_beside,
    counted,
    listed,
    enclosed,
    replaced,
    beside,
    read_meanwhile,
    some_experts,
    mixed_tokens,
    unlike,
    perhaps_twice,
    dropped,
)


MUCH_ALIKE = {
    "listed",
    "replaced",
    "written_beside",
    "some_experts",
    "unlike",
    "dropped",
    "in_an_inner_list",
    "advanced",
}
NAMED = {each.__name__: each for each in REFUSED}


@pytest.mark.parametrize("name", some_thorough(NAMED, MUCH_ALIKE))
def test_loops_that_do_something_else_are_refused(name: str) -> None:
    model, args = example(NAMED[name])
    with pytest.raises(CaptureError, match=r"depends on (numbers|it)"):
        capture(model, args)
