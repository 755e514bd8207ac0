"""The tree of relaxations against branch and cut, and a relaxation from its last basis against one from scratch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from solver import NOWHERE, Consumer, Edge, Network, Node, Problem, evaluate, solve
from solver.backends.backend import Request
from solver.backends.flows import ReadAgain
from solver.backends.integer_program import build
from solver.backends.mathopt import MathOpt
from solver.backends.tree import run_tree
from solver.backends.warm_relaxation import WarmRelaxation
from solver.problem import INFEASIBLE

from .random_problems import random_lives

NO_FALLBACK = 1e-12  # a gap above 0: branch and cut follows only where nothing is found


@pytest.mark.parametrize("relaxations", [1, 3, 200])
def test_a_bound_is_never_above_the_best_nor_an_answer_below_it(relaxations: int) -> None:
    proven = 0
    for seed in range(150):
        problem = random_lives(seed)
        best = solve(problem, backend="highs").cost
        answer = run_tree(problem, Request(relative_gap=NO_FALLBACK, node_limit=relaxations))
        assert not answer.infeasible or best is None
        assert answer.infeasible or best is not None or relaxations < 200
        if answer.bound is not None and best is not None:
            assert answer.bound <= best
        if answer.assignment is not None:
            judged = evaluate(problem, *answer.assignment)
            assert judged.feasible and best is not None and judged.cost >= best
            proven += judged.cost == best == answer.bound
    assert relaxations < 200 or proven > 80


def test_what_a_relaxation_mixes_are_two_assignments_of_the_problem_as_given() -> None:
    mixed = 0
    for seed in range(300):
        problem = random_lives(seed)
        found = solve(problem, node_limit=1, relative_gap=NO_FALLBACK)
        assert len({each.main for each in found.mixtures}) <= 1
        assert len({each.share for each in found.mixtures}) == len(found.mixtures)
        for each in found.mixtures:
            assert each.main.choices != each.other.choices and 0 < each.share <= 1
            # both are ways through the problem, which only a limit may forbid
            main, other = (evaluate(problem, *assignment) for assignment in (each.main, each.other))
            assert main.cost < INFEASIBLE or other.cost < INFEASIBLE
        mixed += bool(found.mixtures)
    assert mixed > 20


def test_a_relaxation_that_is_to_cost_less_is_none_at_most_where_it_does_not() -> None:
    cut = 0
    for seed in range(150):
        program = build(replace(random_lives(seed), usage_price=None))
        cost = WarmRelaxation(program, 0).minimise({}, None).bound
        if cost is None:
            continue
        warm = WarmRelaxation(program, 0)
        less = warm.minimise({}, None, cost - 0.1 * abs(cost) - 1)
        assert less.infeasible or less.bound == pytest.approx(cost)
        assert warm.minimise({}, None, cost + 0.1 * abs(cost) + 1).bound == pytest.approx(cost)
        cut += less.infeasible
    assert cut > 20


def test_a_step_that_says_what_another_one_says_of_copies_adds_a_row_alone() -> None:
    added = 0
    for seed in range(40):
        problem = random_lives(seed)
        if problem.usage_limit is None:
            continue
        once = build(problem).with_usage_rows(problem, [3])
        twice = once.with_usage_rows(problem, [3])
        assert len(twice.costs) == len(once.costs) and len(twice.upper) == len(once.upper) + 1
        added += len(once.costs) > len(build(problem).costs)
    assert added > 10


def test_a_relaxation_that_goes_on_from_its_basis_is_that_from_scratch() -> None:
    rng = np.random.default_rng(0)
    compared = 0
    for seed in range(60):
        problem = replace(random_lives(seed), usage_price=None)
        program = build(problem)
        warm = WarmRelaxation(program, 0)
        for step in (None, 1, 3, 5):
            if step is not None:
                program = program.with_usage_rows(problem, [step])
                warm.grow(program)
            held = {int(column): float(rng.integers(2)) for column in rng.choice(program.choices, 1)}
            for values in (held, {}):
                scratch = program
                for column, value in values.items():
                    sign = 1.0 if value == 0 else -1.0
                    scratch = scratch.with_row(np.array([column]), np.array([sign]), -value)
                found, expected = warm.minimise(values, None), MathOpt("HIGHS").minimise(scratch.relaxed(), Request())
                assert found.infeasible == expected.infeasible
                if not found.infeasible:
                    assert found.bound == pytest.approx(expected.bound, abs=1e-4)
                    compared += 1
    assert compared > 200


def test_a_relaxation_whose_time_is_over_says_nothing() -> None:
    found = WarmRelaxation(build(random_lives(1)), 0).minimise({}, 0.0)
    assert (found.x, found.infeasible) == (None, False)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("only_again", [False, True])
def test_who_wants_a_tensor_only_where_it_is_made_again_is_seen_in_the_edges(turned: bool, only_again: bool) -> None:
    once_or_again, nothing_or_it = np.array([NOWHERE, 0]), np.array([NOWHERE, 0])
    none = np.zeros(0, np.int64)
    network = Network(
        "t",
        1,
        none,
        none,
        none,
        0,
        np.zeros(2, np.int64),
        (),
        (Consumer(1, nothing_or_it),),
        again=Consumer(0, once_or_again),
    )
    prices = np.array([[0, INFEASIBLE if only_again else 0], [0, 0]], np.int64)
    edge = Edge.dense(1, 0, prices.T.copy()) if turned else Edge.dense(0, 1, prices)
    problem = Problem(
        (Node("u", np.zeros(2, np.int64)), Node("k", np.zeros(2, np.int64))), (edge,), networks=(network,)
    )
    assert ReadAgain(problem).by(problem.networks[0], problem.networks[0].backward[0]) == only_again
