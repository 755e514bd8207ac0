"""The tree of relaxations against branch and cut, and a relaxation from its last basis against one from scratch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from solver import NOWHERE, Consumer, Edge, Life, Load, Network, Node, Problem, evaluate, solve
from solver.backends import tree
from solver.backends.backend import Request
from solver.backends.circles import cuts
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


def with_ways_back(problem: Problem) -> Problem:
    """The problem with an arc back for every arc, so that flows can run in circles apart from their ways."""
    networks = (
        replace(
            network,
            tails=np.concatenate([network.tails, network.heads]),
            heads=np.concatenate([network.heads, network.tails]),
            costs=np.concatenate([network.costs, network.costs % 3]),
        )
        for network in problem.networks
    )
    return replace(problem, networks=tuple(networks))


def test_what_is_cut_off_as_a_circle_is_no_answer() -> None:
    proven = circles = 0
    for seed in range(150):
        problem = with_ways_back(random_lives(seed))
        answer = run_tree(problem, Request(relative_gap=NO_FALLBACK))
        best = solve(problem, backend="highs").cost  # whose answers may be dearer than the best ones, never cheaper
        assert not answer.infeasible or best is None
        if answer.bound is not None and best is not None:
            assert answer.bound <= best
        if answer.assignment is not None:
            judged = evaluate(problem, *answer.assignment)
            assert judged.feasible and (best is None or judged.cost <= best)
            proven += judged.cost == answer.bound
        if problem.usage_limit is not None:
            program = build(problem).with_usage_rows(problem, range(12))
            x = WarmRelaxation(program, 0).minimise({}, None).x
            circles += x is not None and bool(cuts(problem, program, x))
    assert proven > 100 and circles > 2


def test_a_copy_that_the_backward_starts_from_was_brought_there() -> None:
    """Made at 0, where it is large, and wanted at 1 in the backward: the way there is dear, a circle with 2 is not."""
    tails, heads, costs = np.array([0, 1, 2]), np.array([1, 2, 1]), np.array([100, 1, 1])
    at_0, at_1, at_both = np.array([0]), np.array([1]), np.array([0, 1])
    network = Network("t", 3, tails, heads, costs, 0, at_0, (Consumer(1, at_both),), (Consumer(2, at_1),))
    network = replace(network, sizes=np.array([9, 1, 1]), lives=(Life(0, ((1, 2), (8, 9))),))
    busy = Node("busy", np.array([0]), further_loads=(Load((4, 5), np.array([9])),))
    nodes = Node("made", np.array([0])), Node("read", np.array([0, 10])), Node("back", np.array([0])), busy
    problem = Problem(nodes, (), usage_limit=10, networks=(network,))
    program = build(problem).with_usage_rows(problem, [4])
    warm = WarmRelaxation(program, 0)
    found = warm.minimise({}, None)
    assert found.x is not None and found.bound is not None and found.bound < 3
    warm.grow(program.extended(0, cuts(problem, program, found.x)))
    assert warm.minimise({}, None).bound == pytest.approx(110)
    answer = run_tree(problem, Request(node_limit=1))
    assert answer.assignment is not None and answer.bound == evaluate(problem, *answer.assignment).cost == 110


def test_a_copy_that_is_kept_in_part_is_made_anew_where_all_of_it_is_too_much(monkeypatch) -> None:
    """The relaxation keeps seven eighths of ten bytes and an eighth of two, where there is room for nine."""
    at_0, at_1, moved = np.array([0]), np.array([1]), np.array([10])
    network = Network("t", 2, at_0, at_1, moved, 0, at_0, (Consumer(1, at_1),), (Consumer(2, at_1),))
    network = replace(network, sizes=np.array([2, 10]), lives=(Life(0, ((1, 2), (8, 9))),))
    busy = Node("busy", np.array([0]), further_loads=(Load((4, 5), np.array([5])),))
    nodes = (*(Node(name, np.array([0])) for name in ("made", "read", "back")), busy)
    problem = Problem(nodes, (), usage_limit=14, networks=(network,))
    once = Request(relative_gap=NO_FALLBACK, node_limit=1)
    found = run_tree(problem, once)
    assert found.assignment is not None and evaluate(problem, *found.assignment).cost == 20
    monkeypatch.setattr(tree, "LEAN", 0.5)
    assert run_tree(problem, once).assignment is None


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
        first = None  # a basis of fewer rows
        for step in (None, 1, 3, 5):
            if step is not None:
                program = program.with_usage_rows(problem, [step])
                warm.grow(program)
            held = {int(column): float(rng.integers(2)) for column in rng.choice(program.choices, 1)}
            for values, basis in ((held, None), ({}, None), (held, first)):
                scratch = program
                for column, value in values.items():
                    sign = 1.0 if value == 0 else -1.0
                    scratch = scratch.with_row(np.array([column]), np.array([sign]), -value)
                found = warm.minimise(values, None, basis=basis)
                expected = MathOpt("HIGHS").minimise(scratch.relaxed(), Request())
                assert found.infeasible == expected.infeasible
                if not found.infeasible:
                    assert found.bound == pytest.approx(expected.bound, abs=1e-4)
                    compared += 1
            first = first or warm.basis
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
