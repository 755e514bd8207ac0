"""What any assignment uses at least, against all assignments."""

from __future__ import annotations

import importlib
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from solver import NOWHERE, Base, Consumer, Life, Load, Network, Node, Problem, Status, evaluate, routed, solve
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
@example(983)  # a view of what is made again
def test_no_assignment_with_copies_uses_less(seed: int) -> None:
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


def copied(
    sizes: list[int], *lives: Life, wants: list[int] | None = None, again: bool = False, held: bool = False
) -> Problem:
    """A tensor that node 0 makes, node 1 reads in the forward and node 2 in the backward, at one of two vertices."""
    both = np.array([0, 1])
    network = Network(
        "w",
        2,
        both,
        both[::-1].copy(),
        np.array([1, 1]),
        0,
        both,
        (Consumer(1, both),),
        (Consumer(2, both if wants is None else np.array(wants)),),
        sizes=np.array(sizes),
        lives=lives,
        held=held,
        again=Consumer(2, np.array([0, NOWHERE])) if again else None,
    )
    return Problem(tuple(Node(f"n{k}", both) for k in range(3)), (), networks=(network,))


def test_the_smallest_copy_counts_from_where_a_tensor_is_made_to_its_last_read() -> None:
    early, late = Life(1, ((2, 3), (4, 6))), Life(5, ((6, 7), (8, 9)))
    assert least_usage(copied([5, 4], early)) == 4
    assert least_usage(copied([5, 4], early, late)) == 4 + 4
    assert least_usage(copied([5, 4], early, late, held=True)) == 0
    assert least_usage(copied([5, 4], early, late, wants=[0, NOWHERE])) == 4  # nobody need keep it for the backward
    assert least_usage(copied([5, 4], early._replace(again=4), late._replace(again=8), again=True)) == 4


def test_what_a_view_is_of_is_there_as_long_as_the_view() -> None:
    of = copied([5, 4], Life(1, ((2, 3), (4, 6))))
    (first,) = of.networks
    seen = replace(first, producer=1, lives=(Life(2, ((3, 4), (9, 10)), Base(0, 0, 0)),), sizes=np.array([9, 3]))
    later = replace(first, lives=(Life(8, ((8, 8), (9, 9))),), sizes=np.array([7, 8]))
    assert least_usage(replace(of, networks=(first, seen))) == 4
    assert least_usage(replace(of, networks=(first, seen, later))) == 3 + 7


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
