"""Tensors without elements: the rest of a slice that takes all, as rotary positions of whole heads leave one.

They are cut along their other dims like any tensor, so that nothing that stands beside them has to be whole.
"""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.mesh import Mesh

from ..fuzz.random_plans import random_plans
from .as_before import check_as_before


class Turned(nn.Module):
    """As many of a head's features are turned as ``turned`` says, which may be all of them, or none."""

    def __init__(self, turned: int) -> None:
        super().__init__()
        self.into, self.out, self.turned = nn.Linear(8, 8), nn.Linear(8, 4), turned

    def forward(self, x: Tensor) -> Tensor:
        heads = self.into(x).unflatten(-1, (2, 4)).transpose(1, 2)
        turned, rest = heads[..., : self.turned], heads[..., self.turned :]
        heads = torch.cat([turned.sin() * turned.exp(), rest], -1)
        return self.out(heads.transpose(1, 2).flatten(2)).square().mean() + rest.square().sum()


def _example(turned: int) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Turned(turned).double(), (torch.randn(8, 6, 8, dtype=torch.float64),)


@pytest.mark.parametrize("baseline", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("turned", [0, 4])
def test_models_with_them_have_the_schemes_of_others(turned: int, baseline: str) -> None:
    model, args = _example(turned)
    given = {"mesh": "a=2,b=2" if baseline == "hsdp" else "a=4", "hardware": "cpu-gloo", "cache": False}
    plan = autoshard.plan(model, args, constraints=[f"baseline {baseline}"], **given)  # type: ignore[arg-type]
    check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("turned", [0, pytest.param(4, marks=pytest.mark.thorough)])
def test_whatever_their_layouts(turned: int) -> None:
    model, args = _example(turned)
    graph = capture(model, args)
    layouts = set()
    for plan in islice(random_plans(graph, Mesh.parse("a=2,b=2"), 0, model, args, {}), 8):
        check_as_before(model, args, plan, rtol=1e-8, atol=1e-10)
        layouts |= {each.outputs[0] for each in plan.operators if each.name.rpartition("/")[2].startswith("slice")}
    assert len(layouts) > 4
