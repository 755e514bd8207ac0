"""Experts without a limit on their tokens, in the ways that people write them, and by a plain loop: the oracle."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPERTS, EACH, WIDTH, INNER = 4, 2, 8, 16


class Dropless(nn.Module):
    """A router and experts (E); ``way`` gives the sum over the experts of each token, by their scores.

    Shapes: n tokens of C features, each of which goes to k experts; S = n k.
    """

    def __init__(self, way: Callable[[Dropless, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.router = nn.Parameter(torch.randn(EXPERTS, WIDTH, generator=generator))
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH, generator=generator) / 4)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, generator=generator) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER, generator=generator) / 4)
        self.scale = nn.Parameter(torch.rand(WIDTH, generator=generator) + 0.5)
        self.way = way

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        """The mean square of what is missing, of (B, T, C) both."""
        tokens = (x * self.scale).flatten(0, 1)
        scores, experts = F.linear(tokens, self.router).softmax(-1).topk(EACH)
        return (self.way(self, tokens, experts, scores).view_as(x) - wanted).square().mean()


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, wanted = (torch.randn(4, 6, WIDTH, generator=generator) for _ in range(2))
    return x, wanted


def looped(model: Dropless, tokens: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    """The oracle: every expert has all tokens, and counts for those that are its own."""
    total = torch.zeros_like(tokens)
    for e in range(EXPERTS):
        gate, up = (F.linear(tokens, model.up[e]) + model.up_bias[e]).chunk(2, -1)
        score = (scores * (experts == e)).sum(-1, keepdim=True)
        total = total + score * F.linear(F.silu(gate) * up, model.down[e])
    return total


def _within(model: Dropless, rows: Tensor, in_order: Tensor, ends: Tensor) -> Tensor:
    """What experts make of sorted rows."""

    def product(x: Tensor, weight: Tensor) -> Tensor:  # torch captures none but that of bfloat16
        return F.grouped_mm(x.bfloat16(), weight.bfloat16().mT, offs=ends).to(x.dtype)

    gate, up = (product(rows, model.up) + model.up_bias[in_order]).chunk(2, -1)
    return product(F.silu(gate) * up, model.down)


def _ends(experts: Tensor) -> Tensor:
    counts = torch.histc(experts.flatten().float(), EXPERTS, 0, EXPERTS - 1)
    return counts.cumsum(0, dtype=torch.int32)


def put_back(model: Dropless, tokens: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    """As in transformers."""
    in_order, order = experts.reshape(-1).sort()
    made = _within(model, tokens[order // EACH], in_order, _ends(in_order)) * scores.reshape(-1)[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return made[back].view(len(tokens), EACH, -1).sum(1)


def sorted_back(model: Dropless, tokens: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    """An order of the order; groups are counted by comparisons, and scores taken where rows are back."""
    group = experts.flatten()
    order = group.argsort(stable=True)
    ends = (group.unsqueeze(-1) == torch.arange(EXPERTS)).sum(0).cumsum(0).int()
    made = _within(model, tokens.repeat_interleave(EACH, 0)[order], group[order], ends)
    return (made[order.argsort()].view(len(tokens), EACH, -1) * scores.unsqueeze(-1)).sum(1)


def added(model: Dropless, tokens: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    """As in torchtitan: rows are gathered, and added to those of the tokens."""
    order = experts.view(-1).argsort(stable=True)
    read = (order // EACH).reshape(-1, 1).expand(-1, tokens.shape[1])
    made = _within(model, tokens.gather(0, read), experts.view(-1)[order], _ends(experts))
    made = made * scores.view(-1)[order].reshape(-1, 1)
    return torch.zeros_like(tokens).scatter_add(0, read, made)


def added_to_a_residual(model: Dropless, tokens: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    in_order, order = experts.flatten().sort()
    read = torch.div(order, EACH, rounding_mode="floor")
    ends = torch.searchsorted(in_order, torch.arange(EXPERTS), right=True, out_int32=True)
    made = _within(model, tokens.index_select(0, read), in_order, ends) * scores.flatten()[order, None]
    return tokens.index_add(0, read, made) - tokens


def written(model: Dropless, tokens: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    """Rows are written where they were."""
    in_order, order = experts.flatten().sort()
    made = torch.empty(len(order), tokens.shape[1])
    made[order] = _within(model, tokens[order // EACH], in_order, _ends(experts))
    return (made.view(len(tokens), EACH, -1) * scores[..., None]).sum(1)


WAYS = {way.__name__: way for way in (put_back, sorted_back, added, added_to_a_residual, written)}


def weighted_by_place(model: Dropless, tokens: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    """Something is done to the sorted rows that is done to them nowhere else."""
    in_order, order = experts.flatten().sort()
    places = torch.linspace(0.5, 1.5, len(order)).unsqueeze(-1)
    made = _within(model, tokens[order // EACH], in_order, _ends(experts)) * places
    return (made[order.argsort()].view(len(tokens), EACH, -1) * scores[..., None]).sum(1)


def summed_up(model: Dropless, tokens: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    """Each sorted row has those before it."""
    in_order, order = experts.flatten().sort()
    made = _within(model, tokens[order // EACH], in_order, _ends(experts)).cumsum(0)
    return (made[order.argsort()].view(len(tokens), EACH, -1) * scores[..., None]).sum(1)


def of_other_ends(model: Dropless, tokens: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    """Groups end where others do: rows meet the matrices of other experts."""
    in_order, order = experts.flatten().sort()
    ends = (torch.arange(1, EXPERTS + 1) * (len(order) // EXPERTS)).int()
    made = _within(model, tokens[order // EACH], in_order, ends)
    return (made[order.argsort()].view(len(tokens), EACH, -1) * scores[..., None]).sum(1)


def those_in_front(model: Dropless, tokens: Tensor, experts: Tensor, scores: Tensor) -> Tensor:
    """No expert has more than eight rows: the place of a row in its group counts."""
    in_order, order = experts.flatten().sort()
    ends = _ends(experts)
    starts = torch.cat([torch.zeros(1, dtype=ends.dtype), ends[:-1]])
    is_in_front = (torch.arange(len(order)) - starts[in_order] < 8).unsqueeze(-1)
    made = _within(model, tokens[order // EACH], in_order, ends) * is_in_front
    return (made[order.argsort()].view(len(tokens), EACH, -1) * scores[..., None]).sum(1)


STAY = {way.__name__: way for way in (weighted_by_place, summed_up, of_other_ends, those_in_front)}
