"""Gradients that are reduced together are written where they travel, and hold no memory but their own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import fx

import autoshard
from autoshard.capture import CapturedGraph, capture
from autoshard.lowering import LocalProgram, Rank, lower
from autoshard.lowering.adapter import ALL_REDUCE_IN_PLACE
from autoshard.lowering.emitter import storages
from autoshard.lowering.local_values import Storage
from autoshard.ops import INTO
from autoshard.plans import ShardingPlan

from ..distributed import cases

aten = torch.ops.aten


def program_of(graph: CapturedGraph, plan: ShardingPlan, coordinate: tuple[int, ...] = ()) -> LocalProgram:
    coordinate = coordinate or (0,) * plan.mesh.ndim
    return lower(graph, plan, Rank(coordinate, torch.device("cpu"), {link: link for link in plan.links}))


def backward_of(program: LocalProgram) -> list[fx.Node]:
    assert program.backward is not None
    return list(program.backward.graph.nodes)


@pytest.mark.parametrize("case", ["mlp", "gpt2", "moe"])
def test_a_product_that_is_reduced_with_others_is_written_where_they_travel(case: str) -> None:
    graph, plan = cases.graph(case), cases.baseline_plan(case, "dp=2", "ddp")
    nodes = backward_of(program_of(graph, plan))
    sent = [node.args[0] for node in nodes if node.target is ALL_REDUCE_IN_PLACE]
    inside = {storage for buffer in sent for storage in storages(buffer)}
    written = {node.meta["label"].tensor for node in nodes if node.target in INTO.values()}
    makers = [graph.nodes[ref.node] for _, ref in graph.gradients]
    assert written == {maker.name for maker in makers if maker.op in INTO} and written
    for node in nodes:
        if node.target in INTO.values():
            assert storages(node).keys() <= inside
        assert node.target is not aten.cat.default or not node.meta["label"].is_copy
    copied = [source for node in nodes if node.target is aten._foreach_copy_.default for source in node.args[1]]
    assert len(copied) == len(makers) - len(written)


@pytest.mark.parametrize("case", ["mlp", "gpt2", "moe"])
def test_where_nothing_is_gathered_ahead_a_bucket_is_made_as_it_sets_out(case: str) -> None:
    plan = replace(cases.baseline_plan(case, "dp=2", "ddp"), gathers_ahead=False)
    nodes = backward_of(program_of(cases.graph(case), plan))
    assert not any(node.target in INTO.values() for node in nodes)
    sent = [node.args[0] for node in nodes if node.target is ALL_REDUCE_IN_PLACE]
    assert sent and all(buffer.target is aten.cat.default for buffer in sent if isinstance(buffer, fx.Node))


class Twice(torch.nn.Module):
    """Two parameters with one gradient, and two with gradients of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = (torch.nn.Parameter(torch.ones(8, 8)) for _ in range(2))
        self.first, self.last = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) @ (self.v + self.w)).square().mean()


def test_a_gradient_that_others_read_is_not() -> None:
    args = (torch.ones(4, 8),)
    graph = capture(Twice(), args)
    pins = ["x=dp:S(0)", *(f"{name}=dp:R" for name in ("v", "w", "first.weight", "last.weight"))]
    plan = autoshard.plan(Twice(), args, mesh="dp=2", hardware="cpu-gloo", pins=pins)
    made = {name: graph.nodes[ref.node].name for name, ref in graph.gradients}
    assert made["v"] == made["w"]
    nodes = backward_of(program_of(graph, plan))
    written = {node.meta["label"].tensor for node in nodes if node.target in INTO.values()}
    assert made["v"] not in written
    assert written <= {made["first.weight"], made["last.weight"]}


@pytest.mark.filterwarnings("ignore::autoshard.errors.StrategyWarning")
@pytest.mark.parametrize(
    ("case", "axes", "seed"),
    [("mlp", "dp=2,tp=2", None), ("mlp odd", "dp=2,tp=2", 0), ("gpt2", "dp=2,tp=2", None), ("gpt2 odd", "tp=3", 2)],
)
def test_gradients_hold_no_memory_but_their_own(case: str, axes: str, seed: int | None) -> None:
    plan = cases.sharded_plan(case, axes) if seed is None else cases.random_plan(case, axes, seed)
    for coordinate in ((0,) * plan.mesh.ndim, tuple(size - 1 for size in plan.mesh.shape)):
        (results,) = backward_of(program_of(cases.graph(case), plan, coordinate))[-1].args
        taken, held = Counter[Storage](), set[Storage]()
        for gradient in results:
            (storage,), value = storages(gradient), gradient.meta["val"]
            taken[storage] += value.numel() * value.element_size()
            held.add(storage)
        assert {storage: storage.size_bytes for storage in held} == dict(taken)
