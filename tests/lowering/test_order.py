"""All ranks send in one order: whatever the plan, what one of them issues and waits for, the others do too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

import pytest
import torch

from autoshard.capture import CapturedGraph, recomputed
from autoshard.lowering import Rank, lower
from autoshard.lowering.adapter import WAIT, collective_name
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan

from ..fuzz.random_plans import random_plans
from ..models import EXAMPLES, graph_of

SEEDS, PLANS, MORE_PLANS = 5, 5, 25
"""For each of the cases: 100 plans in all, of `make test-all` 500 more. Ranks that run such plans, and compare what
they ask of each other, are in tests/fuzz; ranks with a process each in tests/distributed/test_parity.py.
"""

CASES = [("mlp with loss", "a=4"), ("mlp with loss", "a=2,b=2"), ("mlp with loss", "a=3,b=2"), ("mlp", "a=2,b=2")]


@pytest.mark.parametrize("plans", [PLANS, pytest.param(MORE_PLANS, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("name", "axes"), CASES)
def test_ranks_issue_and_wait_in_one_order(name: str, axes: str, plans: int) -> None:
    graph, mesh = graph_of(name), Mesh.parse(axes)
    model, args = EXAMPLES[name]()
    sent = 0
    for seed in range(SEEDS):
        for plan in islice(random_plans(graph, mesh, seed, model, args, {}), plans):
            ranks = Random(seed).sample(list(mesh.coordinates()), 2)
            first, second = (list(_sent(graph, plan, at)) for at in ranks)
            assert first == second, (seed, ranks)
            sent += len(first)
    assert sent > SEEDS * plans


def _sent(graph: CapturedGraph, plan: ShardingPlan, at: tuple[int, ...]) -> Iterator[tuple[object, ...]]:
    """Every collective of a rank as it is issued, with its group and the bytes it takes, and every wait."""
    rank = Rank(at, torch.device("cpu"), {link: link for link in plan.links})
    program = lower(recomputed(graph, plan.recomputed), plan, rank)
    assert program.backward is not None
    for local in (program.forward, program.backward):
        issued: list[object] = []
        for node in local.graph.nodes:
            if node.target is WAIT:
                yield "wait", issued.index(node.args[0])
            elif (kind := collective_name(node)) is not None:
                issued.append(node)
                yield kind, node.args[-1], node.all_input_nodes[0].meta["val"].nbytes
