"""Usages of any size: solved exactly, or refused with what to do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver import BACKENDS, Budget, Edge, Node, Problem, ProblemError, solve
from solver.backends import Request
from solver.backends.exhaustive import Exhaustive
from solver.usages import LARGEST_USAGE, exact_usages

from ..thorough import tries
from .random_problems import random_problem

AVAILABLE = [name for name, entry in BACKENDS.items() if entry.available]
COMPARE = np.array([[5, 1], [1, 6]])
HUGE = 2**62


def four(usages: list[int], limit: int, price: int | None = None) -> Problem:
    """Four nodes, every two joined; strategy 0 is cheap and uses more."""
    nodes = tuple(Node(f"n{k}", np.array([0, 3]), np.array(usages), (0, 2)) for k in range(4))
    edges = tuple(Edge.dense(u, v, COMPARE) for v in range(4) for u in range(v))
    return Problem(nodes, edges, usage_limit=limit, usage_price=price)


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize(
    ("problem", "cost"),
    [
        (four([HUGE, 1], 20), 48),  # strategy 0 never fits: 4 x 3 + 6 x 6
        (four([HUGE, 1], 4 * HUGE), 21),  # the limit cannot bind: one node at 3, three pairs at 5, three at 1
        (four([2**52 + 1, 1], 2**53), 30),  # by a byte only one takes strategy 0: 3 x 3 + 3 x 1 + 3 x 6
        (four([2**52, 0], 2**53), 21),  # two do: 2 x 3 + 5 + 4 x 1 + 6
    ],
)
def test_huge_usages_are_kept_to_the_byte(backend: str, problem: Problem, cost: int) -> None:
    assert cost == Exhaustive().run(problem, Request()).bound
    assert solve(problem, backend=backend, time_limit_s=20).cost == cost


@pytest.mark.parametrize("problem", [four([HUGE, 1], 2 * HUGE), four([HUGE, 1], 20, 3), four([2**54, 1], 2**54)])
def test_what_cannot_be_added_exactly_is_refused_with_a_remedy(problem: Problem) -> None:
    with pytest.raises(ProblemError, match="in a larger unit"):
        solve(problem)


def test_huge_budgets_are_cut_dropped_or_refused() -> None:
    plain = replace(four([1, 1], 0), usage_limit=None)
    usages = {k: np.array([HUGE, 1]) for k in range(4)}
    assert solve(replace(plain, budgets=(Budget("b", 20, usages),))).cost == 48
    assert solve(replace(plain, budgets=(Budget("b", 4 * HUGE, usages),))).cost == 21
    with pytest.raises(ProblemError, match="budget 'b'"):
        solve(replace(plain, budgets=(Budget("b", LARGEST_USAGE + 1, usages),)))


def test_intervals_far_in_the_future_are_only_names_of_steps() -> None:
    nodes = tuple(replace(node, interval=(0, 2**62)) for node in four([7, 1], 14).nodes)
    assert solve(replace(four([7, 1], 14), nodes=nodes)).cost == solve(four([7, 1], 14)).cost


@settings(max_examples=tries(300))
@given(seed=st.integers(0, 10**9))
def test_cutting_keeps_the_answers_of_ordinary_problems(seed: int) -> None:
    problem = random_problem(seed)
    best, cut = Exhaustive().run(problem, Request()), Exhaustive().run(exact_usages(problem), Request())
    assert (cut.infeasible, cut.bound) == (best.infeasible, best.bound)
