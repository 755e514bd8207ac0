"""A scheme that a model cannot have: the error names the operator that stands in its way, and what people do."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.constraints import AxisScheme
from autoshard.errors import InfeasibleError
from autoshard.planning.blocking import why_not
from autoshard.planning.planner import Planner
from cost_models import load_profile


def test_rows_that_ranks_cannot_share_evenly_are_called_that() -> None:
    """Blocks of 2, 2 and 1 rows of (5, 7, 6) are 14, 14 and 7 rows of (35, 6), of which blocks are 12, 12 and 11."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Flatten(0, 1), nn.Linear(6, 6))
    with pytest.raises(
        InfeasibleError, match=r"has no rule for blocks of 5 rows over 3 ranks, of which one is shorter"
    ):
        autoshard.plan(model, (torch.ones(5, 7, 6),), mesh="dp=3", hardware="cpu-gloo", constraints=["baseline ddp"])


@pytest.mark.parametrize("scheme", ["ddp", "fsdp", "tp", "sp", "cp", "ep"])
def test_any_scheme_holds_on_an_axis_of_one_rank(scheme: str) -> None:
    plan = autoshard.plan(
        nn.Linear(6, 6), (torch.ones(4, 6),), mesh="a=1,b=2", hardware="cpu-gloo", constraints=[f"family a={scheme}"]
    )
    assert plan.mesh.shape == (1, 2)


class Layer(nn.Module):
    """Attention that may take batch and heads as one dim, and move what is along it: no block of that dim is some heads
    of all rows.
    """

    def __init__(self, merges: bool, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.o = nn.LayerNorm(width), nn.Linear(width, width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.heads, self.merges = heads, merges

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        normed = self.norm(x)
        parts = (each(normed).view(rows, length, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.merges:
            q, k, v = (part.reshape(rows * self.heads, length, -1) for part in parts)
            y = (q @ k.transpose(-1, -2)).softmax(-1).roll(1, 0) @ v
        else:
            y = F.scaled_dot_product_attention(*parts)
        return x + self.o(y.view(rows, self.heads, length, -1).transpose(1, 2).reshape(rows, length, width))


class Layered(nn.Module):
    def __init__(self, merges: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(merges) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("mesh", ["dp=2,tp=4", pytest.param("tp=4", marks=pytest.mark.thorough)])
def test_the_operator_up_to_which_tensor_parallelism_has_no_plan_is_named(mesh: str) -> None:
    """No operator refuses all that reaches it alone: only together they have no plan."""
    options = {"mesh": mesh, "hardware": "cpu-gloo", "constraints": ["family tp=tp"]}
    assert autoshard.plan(Layered(False), (torch.ones(4, 6, 8),), **options).solver.status == "optimal"
    with pytest.raises(InfeasibleError, match=r"'family tp=tp' cuts layers, but layers.1.norm/bwd\S+ .*goes on"):
        autoshard.plan(Layered(True), (torch.ones(4, 6, 8),), **options)


class Apart(nn.Module):
    """A matrix that is taken apart along dim 0 into parts that no two ranks can share: cut along dim 1, if at all."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.weight = nn.Linear(6, 6), nn.Parameter(torch.ones(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.split([3, 5])
        x = self.before(x)
        return F.linear(x, first).square().mean() + F.linear(x, second).square().mean()


def test_no_operator_is_blamed_that_takes_what_is_gathered_and_cut_along_another_dim() -> None:
    model, args = Apart(), (torch.ones(4, 6),)
    planner = Planner.of_model(model, args, None, "a=2", load_profile("cpu-gloo"))
    scheme = AxisScheme(0, "fsdp", "family a=fsdp")
    plan = autoshard.plan(model, args, mesh="a=2", hardware="cpu-gloo", constraints=["baseline fsdp"])
    assert plan.solver.status == "optimal"
    assert not why_not(planner.graph, scheme, planner.mesh, planner.profile, planner.rulebook, solves=False)
