"""The price of the optimizer's step: what it counts, what it does not, and what it decides."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.layout import largest_local_shape
from autoshard.plans import ShardingPlan
from cost_models import optimizer_policy

from ..distributed import cases
from ..models import graph_of
from ..plans_of import formulated, profile_of


def plan(name: str, **options: Any) -> ShardingPlan:
    model, args = cases.make(name)
    return plan_model(model, args, **options)


def plan_model(model: nn.Module, args: tuple[Tensor, ...], **options: Any) -> ShardingPlan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return autoshard.plan(model, args, **{"mesh": "dp=2,tp=2", "hardware": profile_of("slow")} | options)


def counted_s(plan: ShardingPlan, optimizer: str, untrained: tuple[str, ...] = ()) -> float:
    """The step over the largest shard of every parameter of a plan that is trained."""
    policy, compute = optimizer_policy(optimizer), profile_of("slow").compute
    return math.fsum(
        policy.step_s(
            compute,
            entry.dtype,
            math.prod(largest_local_shape(entry.shape, entry.layout, plan.mesh)),
            getattr(torch, entry.dtype).itemsize,
        )
        for entry in plan.parameters
        if entry.name not in untrained
    )


@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum", "adamw-8bit", "none"])
@pytest.mark.parametrize("name", ["mlp", "mlp odd", pytest.param("llama", marks=pytest.mark.thorough)])
def test_a_plan_counts_the_step_over_the_largest_shard_of_every_parameter(name: str, optimizer: str) -> None:
    found = plan(name, optimizer=optimizer)
    assert found.optimizer_s == pytest.approx(counted_s(found, optimizer), rel=1e-12)
    assert (found.optimizer_s > 0) == (optimizer != "none")
    rounded = 0.5 * (len(found.operators) + len(found.parameters) + 4 * len(found.redistributions))
    assert found.solver.cost_ns == pytest.approx(1e9 * found.step_s, abs=1 + rounded)
    assert found.step_s == found.compute_s + found.communication_s + found.optimizer_s


def test_what_is_not_trained_is_not_stepped() -> None:
    model, args = cases.make("mlp")
    name, first = next(iter(model.named_parameters()))
    first.requires_grad_(False)
    found = plan_model(model, args)
    assert found.optimizer_s == pytest.approx(counted_s(found, "adamw", (name,)), rel=1e-12)
    assert found.optimizer_s < counted_s(found, "adamw")


def test_communication_alone_does_not_count_the_optimizer_but_the_plan_says_it() -> None:
    found = plan("mlp", objective="communication-time", pins="x=dp:S(0)")
    assert found.optimizer_s == pytest.approx(counted_s(found, "adamw"), rel=1e-12)
    assert found.solver.cost_ns == pytest.approx(1e9 * found.communication_s, abs=50)


def test_parameters_of_one_shape_and_two_dtypes_have_prices_of_their_own() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
            self.wide = nn.Parameter(torch.ones(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return ((x * self.narrow).float() @ self.wide).sum()

    found = plan_model(Mixed(), (torch.ones(8, 8, dtype=torch.bfloat16),))
    assert found.optimizer_s == pytest.approx(counted_s(found, "adamw"), rel=1e-12)


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "moe"])
def test_the_price_stands_on_trained_parameters_alone_and_falls_with_the_bytes_held(name: str) -> None:
    graph = graph_of(name)
    free, priced = (
        formulated(graph, "dp=2,tp=2", "slow", policy=optimizer_policy(optimizer)) for optimizer in ("none", "adamw")
    )
    trained = {each for each, _ in graph.gradients}
    dearer = {}
    for i, (before, after) in enumerate(zip(free.problem.nodes, priced.problem.nodes, strict=True)):
        if (before.costs != after.costs).any():
            dearer[before.name] = i
    assert dearer.keys() == trained
    for i in dearer.values():
        meta = graph.nodes[i].outputs[0]
        layouts = [strategy.outputs[0] for strategy in priced.strategies[i]]
        held = [math.prod(largest_local_shape(meta.shape, layout, priced.mesh)) for layout in layouts]
        costs = priced.problem.nodes[i].costs.tolist()
        assert sorted(zip(held, costs)) == sorted(zip(sorted(held), sorted(costs)))


def test_the_price_makes_compute_and_communication_slower_by_no_more_than_it_saves() -> None:
    for name in ("mlp", "llama", "gpt2"):
        free, priced = plan(name, optimizer="none"), plan(name)
        slower_s = priced.compute_s + priced.communication_s - free.step_s
        assert -1e-6 < slower_s <= counted_s(free, "adamw") - priced.optimizer_s + 1e-6


def test_a_bias_that_every_rank_holds_where_no_optimizer_counts_is_cut_where_one_does() -> None:
    cut = {}
    for optimizer in ("none", "adamw"):
        found = plan("mlp", mesh="dp=4", optimizer=optimizer)
        cut[optimizer] = {entry.name for entry in found.parameters if not entry.layout.is_replicated}
    assert "down.bias" in cut["adamw"] - cut["none"] and cut["none"] <= cut["adamw"]
