"""Identical layers are decided alike, but for those that a constraint tells from the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard.capture import CapturedGraph, capture
from autoshard.plans import summarize
from autoshard.plans.views.show import headline
from solver import solve

from ..models import MLP, WithLoss
from ..plans_of import formulated, profile_of


class Tower(nn.Module):
    """Residual layers between an embedding and a head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(MLP(16, 24) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def graph() -> CapturedGraph:
    return capture(WithLoss(Tower(4)), (torch.zeros(12, 8), torch.zeros(12, 8)))


# Every kind of constraint, in a form that names something of one layer alone.
ONE_LAYER = {
    "pin": "model.layers.1.up.weight=dp:S(1)",
    "partition spec": "model.layers.1.up.weight=(None, dp)",
    "pin of an operator": "model.layers.1.up/addmm=*, dp:R, * -> *",
    "exclusion": "model.layers.1.up/addmm!=dp:S(0)",
    "only": "only model.layers.1.up.weight dp:S(0)",
    "forbidden placement": "forbid model.layers.1.up.weight dp:R",
    "collectives of activations": "forbid collectives over dp of activations model.layers.1.*",
    "collectives of gradients": "forbid collectives over dp of gradients model.layers.1.*",
    "collectives of parameters": "forbid collectives over dp of parameters model.layers.1.*",
    "one kind of collective": "forbid all_gather over dp of tensors model.layers.1.down*",
    "alike inside": "alike model.layers.1.up.weight model.layers.1.down.weight",
    "alike with the outside": "alike model.layers.1.up.weight model.embed.weight",
}


def classes(graph: CapturedGraph, *constraints: str) -> list[set[str]]:
    """The nodes that are decided together, by name."""
    problem = formulated(graph, "dp=2", "slow", constraints).problem
    return [{graph.nodes[i].name for i in members} for members in problem.ties]


@pytest.mark.parametrize("constraint", ONE_LAYER.values(), ids=ONE_LAYER.keys())
def test_a_layer_that_a_constraint_names_is_decided_for_itself_at_the_cost_of_free_layers(
    graph: CapturedGraph, constraint: str
) -> None:
    assert not any(name.startswith("model.layers.1.") for names in classes(graph, constraint) for name in names)
    tied, free = (formulated(graph, "dp=2", "slow", (constraint,), tie_layers=tie).problem for tie in (True, False))
    assert solve(tied).cost == solve(free).cost is not None


@pytest.mark.parametrize(
    "constraint",
    [
        "model.layers.*.up.weight=dp:S(0)",
        "forbid all_to_all over dp of activations model.layers.*.up/addmm",
        "forbid all_to_all over dp of tensors",
        "alike model.layers.*.up.weight model.layers.*.down.weight",
        "family dp=fsdp",
        "family dp=tp",
        "output.0=dp:R",
    ],
)
def test_a_constraint_that_treats_all_layers_alike_leaves_them_tied(graph: CapturedGraph, constraint: str) -> None:
    assert {len(names) for names in classes(graph, constraint)} == {4}


def test_collectives_of_what_passes_between_two_layers_tell_both_from_the_others(graph: CapturedGraph) -> None:
    """The result of the middle product is an addend outside of the layers; its gradient goes into the layer again."""
    tied = classes(graph, "forbid collectives over dp of activations model.layers.1.down/addmm")
    assert {len(names) for names in tied} == {3}


def test_a_constraint_on_the_result_counts_for_the_layer_that_makes_it() -> None:
    tower = nn.Sequential(nn.Linear(8, 8), *(MLP(8, 8) for _ in range(3)))
    graph = capture(tower, (torch.zeros(4, 8),))
    assert {len(names) for names in classes(graph)} == {3}
    tied = classes(graph, "output.0=dp:S(1)")
    assert {"1.up.weight", "2.up.weight"} in tied and {len(names) for names in tied} == {2}


def test_a_plan_says_whether_identical_layers_were_decided_alike() -> None:
    model, args = WithLoss(Tower(3)), (torch.zeros(12, 8), torch.zeros(12, 8))
    options: dict[str, Any] = {"mesh": "dp=2", "hardware": profile_of("slow")}
    tied, free = (autoshard.plan(model, args, tie_layers=tie, **options) for tie in (True, False))
    assert (tied.solver.identical_layers, free.solver.identical_layers) == ("alike", "free")
    assert tied.solver.verdict == "optimal with identical layers decided alike" and free.solver.verdict == "optimal"
    alone = autoshard.plan(WithLoss(MLP()), args, **options)  # nothing is identical, so nothing was decided alike
    assert alone.solver.verdict == "optimal"
    assert headline(summarize(tied))[0].startswith("optimal with identical layers decided alike: cost ")


def test_a_budget_and_a_soft_limit_keep_what_the_plan_says_of_layers() -> None:
    model, args = WithLoss(Tower(3)), (torch.zeros(12, 8), torch.zeros(12, 8))
    options: dict[str, Any] = {"mesh": "dp=2", "hardware": profile_of("slow"), "memory": "1GiB"}
    for tie, said in ((True, "alike"), (False, "free")):
        assert autoshard.plan(model, args, tie_layers=tie, **options).solver.identical_layers == said


@pytest.mark.parametrize(("share", "first"), [(0.01, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.9, 3), (1.0, 3)])
def test_the_first_layers_are_decided_apart_from_the_others(graph: CapturedGraph, share: float, first: int) -> None:
    whole = formulated(graph, "dp=2", "slow")
    parts = whole.in_groups(share)
    assert parts.groups == tuple(
        f"model.layers.{{{a}-{b}}}" if a < b else f"model.layers.{a}" for a, b in ((0, first - 1), (first, 3))
    )
    for name in ("up.weight", "down/addmm", "up/bwd.mm"):
        of_layers = [f"model.layers.{k}.{name}" for k in range(4)]
        expected = [set(names) for names in (of_layers[:first], of_layers[first:]) if len(names) > 1]
        found = [{graph.nodes[i].name for i in tie} for tie in parts.problem.ties]
        assert [names for names in found if names & set(of_layers)] == expected
    assert parts.free.ties == parts.problem.ties and whole.groups == ()


def test_a_few_identical_layers_stay_together_beside_many() -> None:
    """As three dense layers before 58 with experts."""
    few, many = [MLP(8, 8) for _ in range(2)], [nn.Sequential(MLP(8, 8), nn.ReLU()) for _ in range(4)]
    tower = nn.Sequential(nn.Linear(8, 8), *few, *many)
    whole = formulated(capture(tower, (torch.zeros(4, 8),)), "dp=2", "slow")
    parts = whole.in_groups(0.5, fewest=3)
    assert parts.groups == ("{3-4}", "{5-6}")
    names = [{whole.graph.nodes[i].name for i in tie} for tie in parts.problem.ties]
    assert {"1.up.weight", "2.up.weight"} in names
    assert {"3.0.up.weight", "4.0.up.weight"} in names


def test_what_is_decided_in_groups_costs_no_more_than_alike_and_no_less_than_free(graph: CapturedGraph) -> None:
    alike, free = (formulated(graph, "dp=2", "slow", tie_layers=tie) for tie in (True, False))
    costs = [solve(each.problem).cost for each in (free, alike.in_groups(0.5), alike)]
    assert None not in costs and costs == sorted(costs)  # type: ignore[type-var]


def test_experts_of_a_layer_stay_in_its_group() -> None:
    tower = nn.Sequential(nn.Linear(8, 8), *(nn.Sequential(*(MLP(8, 8) for _ in range(2))) for _ in range(3)))
    graph = capture(tower, (torch.zeros(4, 8),))
    parts = formulated(graph, "dp=2", "slow").in_groups(0.4)
    assert parts.groups == ("{1-2}", "3")
    found = [{graph.nodes[i].name for i in tie} for tie in parts.problem.ties]
    assert {f"{k}.{j}.up.weight" for k in (1, 2) for j in (0, 1)} in found
    assert {f"3.{j}.up.weight" for j in (0, 1)} in found
