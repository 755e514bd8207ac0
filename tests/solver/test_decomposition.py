"""The decomposition against the oracle, without reductions in front: valid bound, an answer wherever there is one."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver import INFEASIBLE, Edge, Node, Problem, Status, evaluate, solve
from solver.backends import Answer, Request
from solver.backends.decomposition.decomposition import Decomposition
from solver.backends.exhaustive import Exhaustive
from solver.networks import Assignment
from solver.reductions import REDUCTIONS, Contradiction

from ..thorough import tries
from .random_problems import random_problem

SEEDS = st.integers(0, 10**9)
RESOLVED = ("merge budgets", "merge ties", "keep fixed")
COMPARE = np.array([[5, 1], [1, 6]])


def exhaustive(problem: Problem) -> Answer:
    return Exhaustive().run(problem, Request())


def resolved(problem: Problem) -> Problem | None:
    """Without budgets, ties and fixed choices, which a backend need not know; None where they contradict."""
    for name in RESOLVED:
        outcome = REDUCTIONS[name](problem)
        if isinstance(outcome, Contradiction):
            return None
        problem = problem if outcome is None else outcome.problem
    return problem


def least_peak(problem: Problem) -> int | None:
    """The smallest usage limit that leaves an assignment, by brute force."""
    return exhaustive(_priced_peak(problem)).bound


def _priced_peak(problem: Problem) -> Problem:
    nodes = tuple(replace(node, costs=np.where(node.costs >= INFEASIBLE, INFEASIBLE, 0)) for node in problem.nodes)
    edges = tuple(replace(edge, costs=np.where(edge.costs >= INFEASIBLE, INFEASIBLE, 0)) for edge in problem.edges)
    networks = tuple(replace(network, costs=network.costs * 0) for network in problem.networks)
    free = replace(problem, nodes=nodes, edges=edges, groups=(), networks=networks)
    return replace(free, offset=0, usage_limit=0, usage_price=1)


def check(problem: Problem, answer: Answer) -> None:
    """The answer is one of the problem, its bound holds, and it is missing only where there is none."""
    best = exhaustive(problem)
    if best.bound is None:
        assert answer.infeasible and answer.choices is None
        return
    assert not answer.infeasible
    assert answer.assignment is not None
    judged = evaluate(problem, *answer.assignment)
    assert judged.feasible and judged.cost >= best.bound
    assert answer.bound is not None and answer.bound <= best.bound


@settings(max_examples=tries(40))
@given(seed=SEEDS)
def test_bound_and_answer_enclose_the_optimum(seed: int) -> None:
    problem = resolved(random_problem(seed))
    if problem is not None and problem.nodes:
        check(problem, Decomposition().run(problem, Request()))


@pytest.mark.parametrize("spare", [-1, 0, 1, 100])
@settings(max_examples=tries(15))
@given(seed=SEEDS)
def test_memory_from_one_byte_too_little_to_plenty(spare: int, seed: int) -> None:
    problem = resolved(replace(random_problem(seed), budgets=(), usage_limit=None, usage_price=None))
    peak = None if problem is None or not problem.nodes else least_peak(problem)
    if problem is None or peak is None or peak + spare < 0:
        return
    tight = replace(problem, usage_limit=peak + spare)
    answer = Decomposition().run(tight, Request())
    assert answer.infeasible == (spare < 0)
    check(tight, answer)


@settings(max_examples=tries(20))
@given(seed=SEEDS)
def test_one_searcher_with_one_seed_repeats_itself(seed: int) -> None:
    problem = resolved(random_problem(seed))
    if problem is not None and problem.nodes:
        first, again = (Decomposition(searchers=1).run(problem, Request(seed=7)) for _ in range(2))
        assert first == again


@settings(max_examples=tries(20))
@given(seed=SEEDS)
def test_a_feasible_start_is_never_made_worse(seed: int) -> None:
    problem = resolved(random_problem(seed))
    start = None if problem is None or not problem.nodes else _any_feasible(problem)
    if problem is None or start is None:
        return
    answer = Decomposition().run(problem, Request(start=start))
    assert answer.assignment is not None
    assert evaluate(problem, *answer.assignment).cost <= evaluate(problem, *start).cost


def _any_feasible(problem: Problem) -> Assignment | None:
    """The dearest assignment, as far as costs of nodes tell: a start that leaves room for improvement."""
    turned = tuple(
        replace(node, costs=np.where(node.costs >= INFEASIBLE, INFEASIBLE, -node.costs)) for node in problem.nodes
    )
    return exhaustive(replace(problem, nodes=turned)).assignment


def grid(side: int, strategies: int, limit: int | None) -> Problem:
    """A grid of side x side nodes with random costs, all live at once; it always has an assignment of 0 bytes."""
    rng = np.random.default_rng(side)
    usages = rng.integers(0, 9, (side * side, strategies))
    usages[:, -1] = 0
    nodes = tuple(Node(str(k), rng.integers(0, 99, strategies), usages[k], (0, 1)) for k in range(side * side))
    right = [(k, k + 1) for k in range(side * side) if (k + 1) % side]
    down = [(k, k + side) for k in range(side * (side - 1))]
    edges = tuple(Edge.dense(u, v, rng.integers(0, 99, (strategies, strategies))) for u, v in right + down)
    return Problem(nodes, edges, usage_limit=limit)


@pytest.mark.parametrize("limit", [None, 300, 0])
def test_a_short_time_limit_gives_an_answer_and_a_bound(limit: int | None) -> None:
    problem = grid(15, 6, limit)
    solution = solve(problem, backend="decomposition", time_limit_s=1.5)
    assert solution.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert solution.choices is not None and solution.cost is not None and solution.bound is not None
    assert evaluate(problem, solution.choices).feasible
    assert solution.bound <= solution.cost


def test_more_time_never_costs_more_within_one_run() -> None:
    seen: list[tuple[int | None, int | None]] = []
    solution = solve(
        grid(12, 6, 200),
        backend="decomposition",
        time_limit_s=2.0,
        progress=lambda incumbent: seen.append((incumbent.cost, incumbent.bound)),
    )
    costs = [cost for cost, _ in seen if cost is not None]
    bounds = [bound for _, bound in seen if bound is not None]
    assert costs == sorted(costs, reverse=True) and bounds == sorted(bounds)
    assert (costs[-1], bounds[-1]) == (solution.cost, solution.bound)


def test_the_signal_to_stop_returns_the_best_answer_so_far() -> None:
    problem = grid(25, 8, 800)
    found, stop = threading.Event(), threading.Event()
    request = Request(stop=stop, on_progress=lambda cost, bound: found.set() if cost is not None else None)

    def stop_after_the_first() -> None:
        found.wait(60)
        stop.set()

    threading.Thread(target=stop_after_the_first, daemon=True).start()
    answer = Decomposition().run(problem, request)
    assert answer.choices is not None and evaluate(problem, answer.choices).feasible


def test_memory_that_no_assignment_keeps_is_proven_infeasible() -> None:
    nodes = tuple(Node(str(k), np.array([0, 3]), np.array([7, 1]), (0, 2)) for k in range(6))
    edges = tuple(Edge.dense(u, v, COMPARE) for v in range(6) for u in range(v))
    assert Decomposition().run(Problem(nodes, edges, usage_limit=5), Request()).infeasible
    assert Decomposition().run(Problem(nodes, edges, usage_limit=6), Request()).choices == (1,) * 6
