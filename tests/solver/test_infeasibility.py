"""Infeasible problems are explained, soft limits and budgets are kept, huge costs are judged exactly."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver import INFEASIBLE, Budget, Edge, Node, Problem, Status, evaluate, solve
from solver.backends import Answer, Request
from solver.backends.exhaustive import Exhaustive
from solver.infeasibility import explain_infeasibility
from solver.routing import routed

from .random_problems import random_problem

APART = np.array([[INFEASIBLE, 0], [0, INFEASIBLE]])


def three() -> Problem:
    """Three nodes over steps 0 and 1; cheap strategies use 10 bytes, dear ones 6."""
    nodes = tuple(Node(name, np.array([0, 3]), np.array([10, 6]), (0, 2)) for name in "abc")
    return Problem(nodes, (), usage_limit=30)


def test_the_smallest_usage_limit_is_named_with_the_peak_and_who_is_live() -> None:
    solution = solve(replace(three(), usage_limit=17))
    assert solution.status is Status.INFEASIBLE
    assert "smallest usage limit found to work is 18, 1 more than 17" in solution.report.explanation
    assert "step 0" in solution.report.explanation and "'a' 6" in solution.report.explanation


def test_fixed_choices_that_contradict_each_other_are_named_and_no_others() -> None:
    nodes = tuple(Node(name, np.array([0, 0])) for name in "abcd")
    edges = tuple(Edge.dense(u, u + 1, APART) for u in range(3))
    solution = solve(Problem(nodes, edges, fixed={0: 0, 2: 1, 3: 0}))
    assert solution.status is Status.INFEASIBLE
    assert "'a' = 0, 'c' = 1" in solution.report.explanation
    assert "'d'" not in solution.report.explanation


def test_a_budget_that_is_too_small_is_named() -> None:
    budget = Budget("links", 3, {0: np.array([2, 4]), 2: np.array([2, 9])})
    solution = solve(replace(three(), budgets=(budget,)))
    assert solution.status is Status.INFEASIBLE
    assert "budget 'links' must be at least 4, 1 more" in solution.report.explanation


def test_budgets_bind_beside_the_usage_limit() -> None:
    budget = Budget("links", 5, {0: np.array([3, 0]), 1: np.array([3, 0])})
    assert solve(replace(three(), budgets=(budget,))).cost == 3
    assert solve(replace(three(), budgets=(budget,), usage_limit=None)).cost == 3
    assert solve(replace(three(), budgets=(budget,), usage_limit=20)).cost == 9


@pytest.mark.parametrize(("price", "cost"), [(0, 0), (1, 2), (2, 3), (5, 3)])
def test_a_soft_limit_is_paid_where_that_is_cheaper(price: int, cost: int) -> None:
    # 30 bytes against a limit of 28: 2 bytes over cost 2 x price; one dear strategy costs 3 and uses 26.
    solution = solve(replace(three(), usage_limit=28, usage_price=price))
    assert (solution.status, solution.cost) == (Status.OPTIMAL, cost)


def test_costs_whose_sum_passes_int64_are_judged_exactly() -> None:
    big = INFEASIBLE - 1
    nodes = tuple(Node(f"n{k}", np.array([big, big - 1])) for k in range(20))
    edges = tuple(Edge.dense(k, k + 1, np.array([[0, big], [big, 0]])) for k in range(19))
    solution = solve(Problem(nodes, edges))
    assert solution.choices is not None and solution.cost == evaluate(Problem(nodes, edges), solution.choices).cost
    assert solution.cost > 2**63 and solution.bound is not None and solution.bound <= 20 * (big - 1)
    assert solution.gap < 1e-15 or solution.status is not Status.OPTIMAL


def test_the_answer_is_never_worse_than_a_feasible_start() -> None:
    solution = solve(three(), time_limit_s=1e-9, start=(1, 1, 1))
    assert solution.cost is not None and solution.cost <= 9


def test_what_the_time_left_open_is_not_called_minimal() -> None:
    nodes = tuple(Node(name, np.array([0, 0])) for name in "abcd")
    edges = tuple(Edge.dense(u, u + 1, APART) for u in range(3))
    problem = Problem(nodes, edges, fixed={0: 0, 2: 1, 3: 0})

    def only_the_whole(part: Problem) -> Answer:
        return Answer(infeasible=part.fixed == problem.fixed)

    text = explain_infeasibility(problem, only_the_whole)
    assert "time ended" in text and "without any one of them" not in text
    assert "was not found out" in explain_infeasibility(replace(three(), usage_limit=17), lambda part: Answer())


def test_a_reason_is_not_made_up_where_a_sub_problem_was_left_open() -> None:
    budget = Budget("links", 3, {0: np.array([2, 4]), 2: np.array([2, 9])})
    text = explain_infeasibility(
        replace(three(), usage_limit=None, budgets=(budget,)), lambda part: Answer((0, 0, 0), 0)
    )
    assert text == "why was not found out in the time left"


def exhaustive(problem: Problem) -> Answer:
    return Exhaustive().run(problem, Request())


def unlimited(seed: int) -> Problem:
    return replace(random_problem(seed), budgets=(), usage_limit=None, usage_price=None)


def feasible(problem: Problem) -> bool:
    return not exhaustive(problem).infeasible


@settings(max_examples=40)
@given(seed=st.integers(0, 10**9))
def test_the_smallest_usage_limit_is_that_of_brute_force(seed: int) -> None:
    problem = unlimited(seed)
    peaks = [
        (judged.peak_usage, judged.peak_step)
        for choices in product(*(range(len(node.costs)) for node in problem.nodes))
        if (found := routed(problem, choices)) is not None and (judged := evaluate(problem, *found)).feasible
    ]
    least = min((usage for usage, _ in peaks), default=0)
    if least == 0:
        return
    solution = solve(replace(problem, usage_limit=least - 1), backend="highs")
    assert solution.status is Status.INFEASIBLE
    text = solution.report.explanation
    assert f"smallest usage limit found to work is {least}, 1 more than {least - 1}" in text
    found = re.search(r"at its peak, step (\d+)", text)
    assert found is not None and (least, int(found[1])) in peaks


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9), pins=st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_the_named_fixed_choices_are_a_minimal_contradiction(seed: int, pins: list[int]) -> None:
    free = replace(unlimited(seed), fixed={})
    fixed = {k: pin % len(node.costs) for k, (node, pin) in enumerate(zip(free.nodes, pins, strict=False))}
    problem = replace(free, fixed=fixed)
    if feasible(problem):
        return
    text = solve(problem, backend="highs").report.explanation
    if not feasible(free):
        assert re.search(r"the absent pairs( and networks)? alone leave no assignment", text)
        return
    named = {int(node): int(choice) for node, choice in re.findall(r"'n(\d+)' = (\d+)", text.split("they do not: ")[1])}
    assert named.items() <= fixed.items()
    assert not feasible(replace(free, fixed=named))
    for node in named:
        assert feasible(replace(free, fixed={other: pin for other, pin in named.items() if other != node}))
