"""The law of every reduction and of the chain: lift(solve(reduce(p))) costs the same as exhaustive(p)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver import Problem, evaluate
from solver.backends import Answer, Request
from solver.backends.exhaustive import Exhaustive
from solver.reductions import REDUCTIONS, Chain, Contradiction, reduce

from .random_problems import random_problem

SEEDS = st.integers(0, 10**9)
RESOLVED_FIRST = {"merge budgets": 0, "merge ties": 1, "keep fixed": 2}


def exhaustive(problem: Problem) -> Answer:
    return Exhaustive().run(problem, Request())


def resolved(problem: Problem, name: str) -> Problem | None:
    """The problem as the reduction may see it: budgets, ties and fixed choices are resolved before the others run."""
    for first in list(RESOLVED_FIRST)[: RESOLVED_FIRST.get(name, 3)]:
        outcome = REDUCTIONS[first](problem)
        if isinstance(outcome, Contradiction):
            return None
        problem = problem if outcome is None else outcome.problem
    return problem


@pytest.mark.parametrize("name", REDUCTIONS)
@settings(max_examples=150, deadline=None)
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
    if found.choices is not None:
        judged = evaluate(problem, outcome.way_back.lift(found.choices))
        assert judged.feasible and judged.cost == best.bound


@settings(max_examples=400, deadline=None)
@given(seed=SEEDS)
def test_the_chain_keeps_the_least_cost_and_lifts_to_it(seed: int) -> None:
    problem = random_problem(seed)
    best, chain = exhaustive(problem), reduce(problem)
    if isinstance(chain, Contradiction):
        assert best.infeasible
        return
    found = exhaustive(chain.problem)
    assert (found.infeasible, found.bound) == (best.infeasible, best.bound)
    if found.choices is not None:
        judged = evaluate(problem, chain.lift(found.choices))
        assert judged.feasible and judged.cost == best.bound


@settings(max_examples=200, deadline=None)
@given(seed=SEEDS)
def test_lowering_gives_an_assignment_of_the_reduced_problem(seed: int) -> None:
    problem = random_problem(seed)
    chain = reduce(problem)
    if isinstance(chain, Chain):
        evaluate(chain.problem, chain.lower((0,) * len(problem.nodes)))
