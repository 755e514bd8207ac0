"""The law of every reduction and of the chain: lift(solve(reduce(p))) costs the same as exhaustive(p)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver import Edge, Group, Node, Problem, evaluate
from solver.backends import Answer, Request
from solver.backends.exhaustive import Exhaustive
from solver.networks import Assignment, Routes
from solver.reductions import REDUCTIONS, Chain, Contradiction, reduce
from solver.reductions.reduction import Reduced

from ..thorough import tries
from .random_problems import random_problem

SEEDS = st.integers(0, 10**9)
RESOLVED = ("merge budgets", "merge ties", "keep fixed")


def exhaustive(problem: Problem) -> Answer:
    return Exhaustive().run(problem, Request())


def resolved(problem: Problem, name: str) -> Problem | None:
    """The problem as the reduction may see it: budgets, ties and fixed choices are resolved before most others run."""
    before = {"merge equal networks": 0, **{each: k for k, each in enumerate(RESOLVED)}}
    for first in RESOLVED[: before.get(name, len(RESOLVED))]:
        outcome = REDUCTIONS[first](problem)
        if isinstance(outcome, Contradiction):
            return None
        problem = problem if outcome is None else outcome.problem
    return problem


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(max_examples=tries(250))
@given(seed=SEEDS)
def test_one_reduction_keeps_the_least_cost_and_lifts_to_it(name: str, seed: int) -> None:
    problem = resolved(random_problem(seed), name)
    outcome = None if problem is None else REDUCTIONS[name](problem)
    if problem is None or outcome is None:
        return
    best = exhaustive(problem)
    if isinstance(outcome, Contradiction):
        assert best.infeasible
        return
    found = exhaustive(outcome.problem)
    assert (found.infeasible, found.bound) == (best.infeasible, best.bound)
    if found.assignment is not None:
        judged = evaluate(problem, *outcome.way_back.lift(found.assignment))
        assert judged.feasible and judged.cost == best.bound


@settings(max_examples=tries(1000))
@given(seed=SEEDS)
def test_the_chain_keeps_the_least_cost_and_lifts_to_it(seed: int) -> None:
    problem = random_problem(seed)
    best, chain = exhaustive(problem), reduce(problem)
    if isinstance(chain, Contradiction):
        assert best.infeasible
        return
    found = exhaustive(chain.problem)
    assert (found.infeasible, found.bound) == (best.infeasible, best.bound)
    if found.assignment is not None:
        judged = evaluate(problem, *chain.lift(found.assignment))
        assert judged.feasible and judged.cost == best.bound


def test_nodes_that_are_alike_become_one_that_counts_for_all() -> None:
    """Consumers of one tensor that do the same: two columns would be paid twice, one once."""
    maps, costs = np.arange(2), np.array([[3, 4], [9, 0]])
    nodes = (Node("tensor", np.array([0, 1])), *(Node(name, np.array([5, 2])) for name in "pqr"))
    edges = tuple(Edge(0, v, maps, maps, costs) for v in (1, 2, 3))
    outcome = REDUCTIONS["merge duplicate nodes"](Problem(nodes, edges, (Group((0, 1, 2)),)))
    assert isinstance(outcome, Reduced)
    assert [node.costs.tolist() for node in outcome.problem.nodes] == [[0, 1], [15, 6]]
    assert len(outcome.problem.edges) == 1 and outcome.problem.edges[0].costs.tolist() == costs.tolist()
    assert outcome.way_back.lift(Assignment((1, 1))).choices == (1, 1, 1, 1)


def test_what_uses_memory_is_no_duplicate() -> None:
    """Ten bytes have room for one cheap node beside a small one, not for two."""
    other = Node("u", np.array([0]))
    twins = tuple(Node(name, np.array([0, 3]), np.array([7, 1]), (0, 1)) for name in "vw")
    edges = tuple(Edge.dense(0, v, np.array([[1, 2]])) for v in (1, 2))
    problem = Problem((other, *twins), edges, usage_limit=10)
    assert REDUCTIONS["merge duplicate nodes"](problem) is None


def test_a_strategy_that_leaves_too_little_for_the_others_is_dropped() -> None:
    nodes = tuple(Node(name, np.array([0, 1, 2]), np.array([9, 6, 3]), (0, 1)) for name in "ab")
    outcome = REDUCTIONS["drop oversized strategies"](Problem(nodes, (), usage_limit=9))
    assert isinstance(outcome, Reduced)
    assert [load.usages.tolist() for node in outcome.problem.nodes for load in node.loads] == [[6, 3], [6, 3]]
    assert isinstance(REDUCTIONS["drop oversized strategies"](Problem(nodes, (), usage_limit=5)), Contradiction)


@settings(max_examples=tries(200))
@given(seed=SEEDS)
def test_lowering_gives_an_assignment_of_the_reduced_problem(seed: int) -> None:
    problem = random_problem(seed)
    chain = reduce(problem)
    if isinstance(chain, Chain):
        before = Assignment((0,) * len(problem.nodes), (Routes(),) * len(problem.networks))
        evaluate(chain.problem, *chain.lower(before))
