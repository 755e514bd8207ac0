"""A forward that no backward can follow frees every activation after its last use, and changes nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard

from ..one_process import one_rank

ROWS, WIDTH = 64, 8
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


class Deep(nn.Module):
    """As many equal layers as wanted, and a buffer that counts calls."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x).relu().sin()
        return x.square().mean()


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_without_a_backward_the_peak_does_not_grow_with_the_layers(around: Callable[[], Any]) -> None:
    peaks: dict[str, list[int]] = {"with": [], "without": []}
    with one_rank() as mesh:
        for layers in (2, 6):
            reference = Deep(layers)
            parallel = autoshard.auto_parallelize(deepcopy(reference), mesh, (X,))
            for name, context in (("with", nullcontext), ("without", around)):
                with context(), autoshard.measure_memory(*parallel.parameters(), X) as log:
                    loss = parallel(X)
                torch.testing.assert_close(loss, reference(X))
                peaks[name].append(log.peak_bytes - log.held_bytes)
            assert parallel.calls == 2
    assert peaks["without"][0] == peaks["without"][1] <= 4 * X.nbytes
    assert peaks["with"][1] - peaks["with"][0] >= 4 * X.nbytes


def test_a_model_whose_parameters_are_all_frozen_keeps_nothing() -> None:
    with one_rank() as mesh:
        parallel = autoshard.auto_parallelize(Deep(6), mesh, (X,))
        parallel.requires_grad_(False)
        with autoshard.measure_memory(*parallel.parameters(), X) as log:
            parallel(X)
    assert log.peak_bytes - log.held_bytes <= 4 * X.nbytes
