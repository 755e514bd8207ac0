"""Models that quantize their weights and activations while they train: cut along every dim, as in one process."""

from __future__ import annotations

import warnings
from itertools import islice

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.capture import capture
from autoshard.errors import StrategyWarning
from autoshard.layout import S
from autoshard.mesh import Mesh
from autoshard.strategies import Enumerator

from ..fuzz.random_plans import random_plans
from .as_before import check_as_before


class Quantized(nn.Module):
    """A product whose weight has a scale for each row, and whose argument has one for all."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.weight, self.axis = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8) / 10), axis
        self.register_buffer("scales", torch.linspace(0.01, 0.1, 8))
        self.register_buffer("zeros", torch.arange(8, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.fake_quantize_per_tensor_affine(self.enter(x), 0.02, 3, -128, 127)
        weight = torch.fake_quantize_per_channel_affine(self.weight, self.scales, self.zeros, self.axis, -8, 7)
        return torch.fake_quantize_per_tensor_affine(
            F.linear(x, weight), self.scales[:1], self.zeros[:1], -128, 127
        ).sum()


@pytest.mark.parametrize("axis", [0, 1])
def test_quantized_weights_and_activations_are_cut_along_every_dim(axis: int) -> None:
    model, args = Quantized(axis), (torch.randn(4, 8),)
    graph, mesh = capture(model, args), Mesh.parse("a=2")
    with warnings.catch_warnings():
        warnings.simplefilter("error", StrategyWarning)
        enumerator = Enumerator(graph, mesh)
        found = [
            {layout[0] for s in enumerator.strategies(node) if (layout := s.outputs[0])}
            for _, node in graph.of_kind("operator")
            if "fake_quantize" in str(node.op)
        ]
    assert len(found) == 3 and all(cuts >= {S(0), S(1)} for cuts in found)
    for plan in islice(random_plans(graph, mesh, 0, model, args, {}), 3):
        check_as_before(model, args, plan, rtol=1e-4, atol=1e-5)
