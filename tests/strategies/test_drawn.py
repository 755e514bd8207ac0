"""Operators that draw for each element are cut along any dim, and never into addends; others run whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.capture import capture, is_random
from autoshard.errors import StrategyWarning
from autoshard.layout import format_layout
from autoshard.mesh import Mesh
from autoshard.ops import has
from autoshard.strategies import Enumerator


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.rand(4, 6))
        self.lstm = nn.LSTM(6, 6, 2, dropout=0.5)

    def forward(self) -> list[Tensor]:
        w = self.w
        return [
            F.dropout(w, 0.1, True),
            F.alpha_dropout(w, 0.1, True),
            F.gumbel_softmax(w),
            w * torch.bernoulli(w.detach()),
            w + torch.rand_like(w) + torch.randn_like(w) + torch.randint_like(w, 5),
            w + torch.rand(4, 6) + torch.randn(4, 6) + torch.randint(5, (4, 6)) + torch.normal(0.0, 1.0, (4, 6)),
            w + torch.normal(w.detach()) + torch.empty_like(w).normal_() + torch.empty_like(w).uniform_(),
            self.lstm(w.expand(2, 4, 6))[0],
        ]


def test_what_draws_for_each_element_can_be_cut_along_any_dim_but_is_no_addend() -> None:
    graph, mesh = capture(Draws(), ()), Mesh.parse("dp=2")
    drawing = [node for node in graph.nodes if is_random(node)]
    assert len(drawing) == 15
    enumerator = Enumerator(graph, mesh)
    for node in drawing:
        assert has(node, "drawn"), node.name
        (first, *_) = node.outputs
        assert first is not None
        cuts = {"dp:R", *(f"dp:S({dim})" for dim in range(len(first.shape)))}
        found = enumerator.strategies(node)
        assert {format_layout(layout, mesh) for each in found for layout in each.outputs[:1] if layout} == cuts
        for strategy in found:
            assert len({*strategy.inputs, *strategy.outputs}) == 1, node.name


def test_what_cannot_draw_an_element_by_itself_runs_whole() -> None:
    class Picks(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.multinomial(x, 2), torch.poisson(x)

    graph = capture(Picks(), (torch.rand(4, 6),))
    enumerator = Enumerator(graph, Mesh.parse("dp=2"))
    drawing = [node for node in graph.nodes if is_random(node)]
    assert len(drawing) == 2
    for node in drawing:
        with pytest.warns(StrategyWarning, match="all ranks must draw alike"):
            (whole,) = enumerator.strategies(node)
        assert all(layout is not None and layout.is_replicated for layout in whole.outputs)
