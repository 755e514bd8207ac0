"""Ways on networks: each step of the routes is some way's own, once; pairs of layouts never cost less."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import Ref, capture
from autoshard.layout import Layout, R, S
from autoshard.lowering import check_redistributions
from autoshard.lowering.local_program import Rank, lower
from autoshard.lowering.verify import verify
from autoshard.planning import interpret, pair_problem
from autoshard.planning.tensor_networks import TensorNetwork, layout_of, ways
from autoshard.plans import Collective, Redistribution, ShardingPlan
from solver import Consumer, Network, Routes, solve
from solver.networks import NOWHERE

from ..models import graph_of
from ..oracles import groups_of
from ..plans_of import Planned, formulated, planned, profile_of
from ..thorough import some_thorough

LAYOUTS = tuple(Layout(each) for each in itertools.product((R, S(0), S(1), S(2)), repeat=2))
MADE = 0


def drawn(draw: random.Random, kept: bool) -> tuple[TensorNetwork, dict[str, list[Layout]], Routes]:
    """A network whose routes are a random tree, of which the forward takes a part, and what each phase wants of it."""
    vertices = range(len(LAYOUTS))
    trees = [{vertex: draw.randrange(vertex) for vertex in vertices[1:]} for _ in range(1 if kept else 2)]
    arcs = [arc for tree in trees for arc in tree.items()]
    wanted = {phase: draw.sample(vertices[1:], draw.randrange(1, 6)) for phase in ("forward", "backward")}
    used: dict[str, set[int]] = {}
    for phase, tree, first in (("forward", trees[0], 0), ("backward", trees[-1], len(arcs) - len(trees[-1]))):
        used[phase] = set()
        for vertex in wanted[phase]:
            while vertex != MADE:
                used[phase].add(first + vertex - 1)
                vertex = tree[vertex]
    forward, backward = used["forward"], used["backward"] - (used["forward"] if kept else set())
    heads, tails = (np.array([arc[k] for arc in arcs], np.int64) for k in (0, 1))
    strategies = np.arange(len(LAYOUTS))
    network = Network(
        "t",
        len(LAYOUTS),
        tails,
        heads,
        np.ones(len(arcs), np.int64),
        0,
        strategies,
        (Consumer(1, strategies),),
        kept=kept,
    )
    found = TensorNetwork(Ref(0), LAYOUTS, (), network)
    layouts = {phase: [LAYOUTS[vertex] for vertex in each] for phase, each in wanted.items()}
    return found, layouts, Routes(tuple(sorted(forward)), tuple(sorted(backward)))


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("seed", range(100))
def test_the_own_steps_of_all_ways_are_the_routes(seed: int, kept: bool) -> None:
    found, wanted, routes = drawn(random.Random(seed), kept)
    ends = list(zip(found.network.tails.tolist(), found.network.heads.tolist(), strict=True))
    there: dict[str, set[tuple[Layout, ...]]] = {"forward": {(LAYOUTS[MADE],)}, "backward": {(LAYOUTS[MADE],)}}
    for phase, arcs in (("forward", routes.forward), ("backward", routes.backward)):
        taken = []
        for layout, way in zip(wanted[phase], ways(found, phase, LAYOUTS[MADE], wanted[phase], routes)):
            assert (way.path[0], way.path[-1]) == (LAYOUTS[MADE], layout)
            assert not way.kept or (kept and phase == "backward" and way.shared)
            assert way.path[: way.shared + 1] in there["forward" if way.kept else phase]
            taken += list(itertools.pairwise(way.path[way.shared :]))
            there[phase].update(way.path[: k + 1] for k in range(len(way.path)))
        assert sorted(taken) == sorted((LAYOUTS[ends[arc][0]], LAYOUTS[ends[arc][1]]) for arc in arcs)


@pytest.mark.parametrize("keep_copies", [True, pytest.param(False, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    ("name", "mesh"),
    some_thorough([("llama", "dp=2,tp=2"), ("gpt2", "dp=2,tp=2"), ("moe", "dp=2,ep=2")], [("llama", "dp=2,tp=2")]),
)
def test_pairs_of_layouts_never_cost_less(name: str, mesh: str, keep_copies: bool) -> None:
    """Nor more, where no way shares steps with another; a pair is rounded once, its steps each."""
    formulation = formulated(graph_of(name), mesh, "slow", keep_copies=keep_copies)
    networks, pairs = solve(formulation.problem), solve(pair_problem(formulation))
    assert networks.cost is not None and pairs.cost is not None
    plan = interpret(formulation, networks, profile_of("slow"), name, "")
    assert plan.solver.cost_ns == networks.cost
    rounded = sum(len(entry.path) for entry in plan.redistributions)
    assert networks.cost <= pairs.cost + rounded
    if not any(entry.shared and not entry.kept for entry in plan.redistributions):
        assert pairs.cost <= networks.cost + rounded


def test_three_axes_are_solved_to_the_optimum() -> None:
    found = planned("llama", "pp=2,dp=2,tp=2", "slow")
    assert found.plan.solver.status == "optimal"
    check_redistributions(found.plan, found.graph)


def unshared(found: Planned) -> ShardingPlan:
    """A plan as format 3 had it: every redistribution takes all steps of its path, or finds the last layout kept."""

    def taken(entry: Redistribution) -> Redistribution:
        if entry.kept and len(entry.own) == 1:
            return entry
        steps = found.formulation.prices.along_s(metas[entry.tensor], entry.path)
        sent = (
            Collective(step.kind, found.plan.mesh.named(step.axes), size, time_s)  # type: ignore[arg-type]
            for step, size, time_s in steps
            if step.communicates
        )
        return replace(entry, shared=0, kept=False, collectives=tuple(sent))

    metas = {tensor.network.name: found.graph.meta(tensor.ref) for tensor in found.formulation.networks}
    return replace(found.plan, redistributions=tuple(map(taken, found.plan.redistributions)))


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama odd", "dp=2,tp=3"), ("llama", "dp=2,tp=2"), ("gpt2", "pp=2,dp=2,tp=2")]
)
def test_shared_steps_run_once_and_others_for_each_that_takes_them(name: str, mesh: str) -> None:
    whole = ("forbid */mean tp:P(sum)",) if name == "llama odd" else ()  # so that norms want whole rows
    found = planned(name, mesh, "slow", ("tokens=dp:S(0)", *whole))
    groups = groups_of(found.plan.mesh)
    for plan in (found.plan, unshared(found)):
        check_redistributions(plan, found.graph)
        program = lower(found.graph, plan, Rank((0,) * found.plan.mesh.ndim, torch.device("cpu"), groups))
        verify(program, plan, groups)
    partly = [entry for entry in found.plan.redistributions if entry.shared and len(entry.own) > 1]
    assert partly or name != "llama odd"


class Shifted(nn.Module):
    """The gradient of its parameter is the gradient that the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.Linear(4, 4).weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight + x


def test_a_gradient_that_is_a_tangent_is_taken_to_its_parameter() -> None:
    graph = capture(Shifted(), (torch.ones(4, 4),))
    formulation = formulated(graph, "dp=2", "slow", ("weight=dp:S(1)", "output.0=dp:S(0)"))
    plan = interpret(formulation, solve(formulation.problem), profile_of("slow"), "shifted", "")
    assert any(entry.tensor == "grad.0" for entry in plan.redistributions)
    check_redistributions(plan, graph)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ["llama", "moe"])
def test_every_network_is_that_of_its_own_tensor_and_its_own_ends(name: str, again: bool) -> None:
    """Networks that are alike are made of one another."""
    program = formulated(graph_of(name), "dp=2,tp=2", "cpu-gloo", chooses_again=again)
    graph, makers = program.graph, dict(program.seconds)

    def vertices(found: TensorNetwork, node: int, position: int | None) -> list[int]:
        layouts = [layout_of(each, position, found.ref.output) for each in program.strategies[node]]
        places = [found.layouts.index(layout) for layout in layouts]
        if node in makers:
            return [NOWHERE] * len(places) + places
        return places * 2 if node in program.twice else places

    for found in program.networks:
        network = found.network
        assert network.name == graph.tensor_name(found.ref)
        expected = [(found.ref.node, vertices(found, found.ref.node, None))]
        for phase in ("forward", "backward"):
            consumers = [each for demand in found.demands if demand.phase == phase for each in demand.consumers]
            expected += [(makers.get(node, node), vertices(found, node, position)) for node, position in consumers]
        if found.again is not None:
            expected.append((found.ref.node, vertices(found, found.again, None)))
        assert [(node, wants.tolist()) for node, wants in network.ends] == expected
        meta, prices = graph.meta(found.ref), program.prices
        if not any(demand.banned for demand in found.demands):
            for (before, after), cost in zip(found.ends(), network.costs.tolist(), strict=True):
                ((_, _, seconds),) = prices.along_s(meta, (before, after), prices.together(found.ref))
                assert cost == pytest.approx(seconds * 1e9, abs=1)
