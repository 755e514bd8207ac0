"""Regions that must switch as a whole to fit memory: a knapsack that single moves cannot see."""

from __future__ import annotations

import numpy as np

from solver import Edge, Node, Problem, Status, solve

REGION = 3


def regions(count: int, limit: int) -> Problem:
    """Chains whose nodes agree at any price; strategy 0 is free and uses memory, strategy 1 costs and uses little."""
    rng = np.random.default_rng(5)
    apart = np.array([[0, 10_000], [10_000, 0]])
    nodes, edges = [], []
    for region in range(count):
        cost, size = int(rng.integers(50, 100)), int(rng.integers(20, 40))
        for k in range(REGION):
            nodes.append(Node(f"{region}.{k}", np.array([0, cost]), np.array([size, 1]), (0, 1)))
        first = region * REGION
        edges += [Edge.dense(first + k, first + k + 1, apart) for k in range(REGION - 1)]
    return Problem(tuple(nodes), tuple(edges), usage_limit=limit)


def test_whole_regions_are_switched_to_use_the_memory_that_there_is() -> None:
    problem = regions(12, limit=500)
    exact, found = solve(problem, backend="highs"), solve(problem, backend="decomposition")
    assert exact.status is Status.OPTIMAL
    assert found.cost == exact.cost
    assert found.bound is not None and exact.cost is not None and found.bound <= exact.cost
