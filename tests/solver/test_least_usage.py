"""What any assignment uses at least, against all assignments."""

from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from solver import Load, Node, Problem, Status, evaluate, routed, solve
from solver.backends import Answer, Request
from solver.least_usage import least_usage

from ..thorough import tries
from .random_problems import random_lives, random_problem


@settings(max_examples=tries(100), deadline=None)
@given(st.integers(0, 10**6))
def test_no_assignment_uses_less(seed: int) -> None:
    problem = random_problem(seed)
    all_choices = list(product(*(range(len(node.costs)) for node in problem.nodes)))
    assume(len(all_choices) <= 200)
    bare = replace(problem, networks=(), ties=(), fixed={})
    assert least_usage(problem) <= min(evaluate(bare, choices).peak_usage for choices in all_choices)


@settings(max_examples=tries(100), deadline=None)
@given(st.integers(0, 10**6))
def test_what_copies_hold_comes_on_top(seed: int) -> None:
    problem = random_lives(seed)
    for choices in product(*(range(len(node.costs)) for node in problem.nodes)):
        found = routed(problem, choices)
        if found is not None:
            assert least_usage(problem) <= evaluate(problem, *found).peak_usage


def loaded(*loads: tuple[int, int, list[int]]) -> Problem:
    """A node for each load, all of two strategies of which the second costs more."""
    nodes = (Node(f"n{k}", np.array([0, 1]), np.array(each), (lo, hi)) for k, (lo, hi, each) in enumerate(loads))
    return Problem(tuple(nodes), ())


def test_loads_count_while_they_are_live() -> None:
    assert least_usage(Problem((Node("n", np.array([0])),), ())) == 0
    problem = loaded((0, 4, [9, 5]), (2, 3, [4, 8]), (3, 6, [7, 6]))
    assert least_usage(problem) == 5 + 6
    more = Load((3, 4), np.array([2, 3]))
    first, *others = problem.nodes
    assert least_usage(replace(problem, nodes=(replace(first, further_loads=(more,)), *others))) == 5 + 2 + 6


class Unasked:
    """A backend that nobody may ask."""

    def run(self, problem: Problem, request: Request) -> Answer:
        raise AssertionError("a backend was asked")


def test_a_limit_that_nothing_keeps_asks_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(loaded((0, 4, [9, 5]), (2, 3, [4, 8]), (3, 6, [7, 6])), usage_limit=10)
    monkeypatch.setattr(importlib.import_module("solver.solve"), "load_backend", lambda name: Unasked())
    assert solve(problem, explains=False).status is Status.INFEASIBLE
    with pytest.raises(AssertionError, match="was asked"):
        solve(replace(problem, usage_price=1))
