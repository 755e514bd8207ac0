"""Parts of a problem that share neither an edge nor memory are solved apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver import INFEASIBLE, Consumer, Edge, Node, Problem, Status, evaluate, solve
from solver.backends import Answer, Request
from solver.backends.exhaustive import Exhaustive
from solver.components import solve_parts, split
from solver.reductions import Contradiction, reduce

from ..thorough import tries
from .random_problems import random_problem


def pairs(usage: int, limit: int | None) -> Problem:
    """Two pairs of nodes; each pair would rather differ."""
    same = np.array([[5, 0], [0, 5]])
    nodes = tuple(Node(f"n{k}", np.array([0, 1]), np.array([usage, 0]), (0, 1)) for k in range(4))
    return Problem(nodes, (Edge.dense(0, 2, same), Edge.dense(1, 3, same)), usage_limit=limit, offset=7)


def test_edges_join_nodes_to_a_part() -> None:
    assert [part.nodes for part in split(pairs(0, None))] == [(0, 2), (1, 3)]


@pytest.mark.parametrize(("usage", "limit", "parts"), [(3, 10, 1), (0, 10, 1), (3, None, 2)])
def test_memory_joins_the_nodes_that_use_it(usage: int, limit: int | None, parts: int) -> None:
    assert len(split(pairs(usage, limit))) == parts


@settings(max_examples=tries(200))
@given(first=st.integers(0, 10**9), second=st.integers(0, 10**9))
def test_two_problems_side_by_side_cost_the_sum_of_both(first: int, second: int) -> None:
    chains = [
        reduce(replace(random_problem(seed), usage_limit=None, usage_price=None, budgets=()))
        for seed in (first, second)
    ]
    if any(isinstance(chain, Contradiction) for chain in chains):
        return
    one, other = (chain.problem for chain in chains if not isinstance(chain, Contradiction))
    shift = len(one.nodes)
    moved = tuple(Edge(e.u + shift, e.v + shift, e.rows, e.cols, e.costs) for e in other.edges)
    edges = len(one.edges)
    groups = tuple(replace(g, edges=tuple(index + edges for index in g.edges)) for g in other.groups)
    networks = (net.between(lambda node, vertices: Consumer(node + shift, vertices)) for net in other.networks)
    both = replace(
        one,
        nodes=one.nodes + other.nodes,
        edges=one.edges + moved,
        groups=one.groups + groups,
        networks=(*one.networks, *networks),
        offset=one.offset + other.offset,
    )
    answer = solve_parts(Exhaustive().run, both, Request())
    apart = [Exhaustive().run(problem, Request()) for problem in (one, other)]
    assert answer.infeasible == any(each.infeasible for each in apart)
    if answer.assignment is not None:
        assert answer.bound == sum(each.bound or 0 for each in apart) == evaluate(both, *answer.assignment).cost


def test_progress_of_the_last_part_is_reported_on_top_of_the_others() -> None:
    def run(problem: Problem, request: Request) -> Answer:
        answer = Exhaustive().run(problem, request)
        request.on_progress(answer.bound, answer.bound)
        return answer

    seen: list[tuple[int | None, int | None]] = []
    request = Request(on_progress=lambda cost, bound: seen.append((cost, bound)))
    solve_parts(run, pairs(0, None), request)
    assert seen == [(7 + 1 + 1, 7 + 1 + 1)]


def test_one_infeasible_part_makes_the_whole_infeasible() -> None:
    triangle = np.array([[INFEASIBLE, 0], [0, INFEASIBLE]])
    nodes = tuple(Node(f"n{k}", np.array([0, 0])) for k in range(5))
    ends = ((0, 1), (1, 2), (0, 2))
    joined = Edge.dense(3, 4, np.array([[0, 1], [1, 0]]))
    problem = Problem(nodes, (*(Edge.dense(u, v, triangle) for u, v in ends), joined))
    assert solve(problem).status is Status.INFEASIBLE
