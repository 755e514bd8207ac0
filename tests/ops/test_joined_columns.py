"""Columns that are joined in front of one product, as heads and what an MLP made are: cut in parts, to the end."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoshard
from autoshard.capture import capture
from autoshard.errors import StrategyWarning
from autoshard.layout import S
from autoshard.mesh import Mesh
from autoshard.ops import columns_joined
from autoshard.strategies import Enumerator

from ..fuzz.random_plans import random_plan
from ..lowering.as_before import check_as_before
from ..oracles import run_node, strategy_error, wide
from ..thorough import some_thorough

SIZE, HEADS = 16, 4


class Block(nn.Module):
    """One stream of FLUX or HunyuanVideo: attention and an MLP of the same, and one matrix for both."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(SIZE), nn.Linear(SIZE, hidden)
        self.q, self.k, self.v = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.out = nn.Linear(SIZE + hidden, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (made(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for made in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(torch.cat([heads, F.gelu(self.up(y), approximate="tanh")], -1).tanh())


class Stream(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(hidden), Block(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()  # type: ignore[no-any-return]


PARTS = {16: 2, 24: 5, 64: 5}
"""Hidden features beside the heads' 16, and how many equal parts both have."""


def example(hidden: int) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    return Stream(hidden).double(), (torch.randn(4, 8, SIZE, dtype=torch.float64),)


@pytest.mark.parametrize("hidden", some_thorough([16, 64], {16}))
def test_both_are_cut_by_tp_and_the_product_by_rows(hidden: int) -> None:
    model, args = example(hidden)
    plan = autoshard.plan(model, args, mesh="dp=2,tp=2", hardware="cpu-gloo", constraints=["baseline fsdp+tp"])
    over_tp = {entry.name: entry.layout.placements[1] for entry in plan.parameters}
    parts = PARTS[hidden]
    for block in ("blocks.0", "blocks.1"):
        assert over_tp[f"{block}.out.weight"] == S(1, (1,) * parts)
        assert over_tp[f"{block}.up.weight"] == (S(0, (1,) * (parts - 1)) if parts > 2 else S(0))
        assert {over_tp[f"{block}.{name}.weight"] for name in "qkv"} == {S(0)}
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)


def test_of_other_lengths_each_is_cut_and_the_matrix_is_whole() -> None:
    """Heads cannot be cut in parts, and no parameter in unequal ones."""
    model, args = example(24)
    with pytest.warns(StrategyWarning, match=r"leaving blocks\.\*\.out\.weight"):
        plan = autoshard.plan(model, args, mesh="tp=2", hardware="cpu-gloo", constraints=["baseline tp"])
    found = {entry.name: entry.layout.placements[0] for entry in plan.parameters}
    assert {found[f"blocks.0.{name}.weight"] for name in ("q", "k", "v", "up")} == {S(0)}
    assert any(p == S(1, (2, 3)) for entry in plan.operators for layout in entry.inputs for p in layout)
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("hidden", some_thorough(PARTS, {16}))
def test_whatever_is_cut(hidden: int) -> None:
    model, args = example(hidden)
    for seed in range(2):
        plan = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), seed, model, args, {})
        check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("mesh", ["a=2", "a=4", "a=2,b=2"])
@pytest.mark.parametrize("hidden", PARTS)
def test_every_way_to_cut_what_joins_and_what_takes_ranges_is_right(hidden: int, mesh: str) -> None:
    model, args = example(hidden)
    graph, generator = capture(model, args), torch.Generator().manual_seed(0)
    enumerator, found = Enumerator(graph, Mesh.parse(mesh)), set()
    for _, node in graph.of_kind("operator"):
        name = str(node.op)
        if not name.startswith(("aten.cat", "aten.slice")):
            continue
        values = {ref: torch.randn(graph.meta(ref).shape, generator=generator).double() for ref in node.inputs}
        expected = list(run_node(wide(node), values.__getitem__))
        for strategy in enumerator.strategies(node):
            parts = {p.parts for layout in (*strategy.inputs, *strategy.outputs) for p in layout or () if p.parts}
            if parts:
                found |= {(name, each) for each in parts}
                given = [values[ref] for ref in node.inputs]
                assert not strategy_error(wide(node), given, expected, strategy, Mesh.parse(mesh))
    assert {(name, (1,) * PARTS[hidden]) for name in ("aten.cat.default", "aten.slice.Tensor")} <= found


class Others(nn.Module):
    """Rotations of heads, rows behind each other, and columns that no product made, or that meet no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(SIZE, SIZE), nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        half = y.unflatten(-1, (HEADS, -1))
        turned = torch.cat([-half[..., 2:], half[..., :2]], -1).flatten(2) * y
        rows = self.linear(torch.cat([y, turned], 1))
        given = self.out(torch.cat([x, x.cos()], -1))
        return torch.cat([y, turned], -1).square().mean() + rows.mean() + given.mean()  # type: ignore[no-any-return]


def test_nothing_else_that_is_joined_is_cut_in_parts_for_it() -> None:
    graph = capture(Others(), (torch.randn(4, 8, SIZE),))
    assert sum(str(node.op) == "aten.cat.default" for node in graph.nodes) == 4
    assert not list(columns_joined(graph))
    assert len(list(columns_joined(capture(*example(24))))) == 4


class Fused(nn.Module):
    """One stream of FLUX.2: queries, keys, values, and both halves of a gated MLP of one matrix."""

    def __init__(self, by_slices: bool) -> None:
        super().__init__()
        self.norm, self.by_slices = nn.LayerNorm(SIZE), by_slices
        self.all, self.out = nn.Linear(SIZE, 9 * SIZE, bias=False), nn.Linear(4 * SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        y = self.all(self.norm(x))
        heads, mlp = (y[..., : 3 * SIZE], y[..., 3 * SIZE :]) if self.by_slices else y.split([3 * SIZE, 6 * SIZE], -1)
        q, k, v = (made.unflatten(-1, (HEADS, -1)).transpose(1, 2) for made in heads.chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        gate, up = mlp.chunk(2, -1)
        return x + self.out(torch.cat([found, F.silu(gate) * up], -1))


@pytest.mark.parametrize("by_slices", [False, True])
def test_what_one_matrix_makes_for_both_is_cut_in_equal_parts(by_slices: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Fused(by_slices), Fused(by_slices), Mean()).double()
    args = (torch.randn(4, 8, SIZE, dtype=torch.float64),)
    plan = autoshard.plan(model, args, mesh="dp=2,tp=2", hardware="cpu-gloo", constraints=["baseline fsdp+tp"])
    over_tp = {entry.name: entry.layout.placements[1] for entry in plan.parameters}
    for block in "01":
        assert (over_tp[f"{block}.all.weight"], over_tp[f"{block}.out.weight"]) == (S(0, (1,) * 9), S(1, (1,) * 4))
    check_as_before(model, args, plan, rtol=1e-9, atol=1e-11)
    for seed in range(2):
        drawn = random_plan(capture(model, args), Mesh.parse("a=2,b=2"), seed, model, args, {})
        check_as_before(model, args, drawn, rtol=1e-9, atol=1e-11)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()
