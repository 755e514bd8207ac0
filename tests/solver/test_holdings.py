"""What the program's memory rows count, against the evaluator."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from solver import Network, Problem, evaluate
from solver.backends import Request
from solver.backends.circles import cuts
from solver.backends.integer_program import FloatArray, Program, build
from solver.backends.mathopt import MathOpt
from solver.routing import Router

from ..thorough import some_thorough
from .random_problems import random_lives

SEEDS = 150


def with_all_arcs(problem: Problem, seed: int) -> Problem:
    """The problem with an arc from every vertex of a network to every other, none of them free."""
    rng = random.Random(seed)

    def dense(network: Network) -> Network:
        ends = [(a, b) for a in range(network.vertices) for b in range(network.vertices) if a != b]
        tails, heads = (np.array([each[k] for each in ends], np.int64) for k in (0, 1))
        return replace(network, tails=tails, heads=heads, costs=np.array([rng.randint(1, 9) for _ in ends], np.int64))

    networks = tuple(map(dense, problem.networks))
    return replace(problem, networks=networks, usage_limit=rng.randint(3, 14), usage_price=None)


def all_steps(problem: Problem) -> set[int]:
    lives = [life for network in problem.networks for life in network.lives]
    steps = {step for life in lives for step in (life.made, *(end for read in life.reads for end in read))}
    steps |= {life.again for life in lives if life.again is not None}
    return steps | {lo for node in problem.nodes for (lo, _), _ in node.loads}


def is_tree(problem: Problem, program: Program, x: FloatArray) -> bool:
    """Whether flows are whole, and all of a phase take a vertex's copy from one place."""
    if cuts(problem, program, x):
        return False
    for index, phases in program.phases.items():
        heads = problem.networks[index].heads
        for flows in phases:
            columns = [column for flow in flows for column in flow.columns.tolist()]
            if np.abs(x[columns] - np.rint(x[columns])).max(initial=0.0) > 1e-6:
                return False
            used = {int(arc) for flow in flows for arc in flow.arcs[x[flow.columns] > 0.5]}
            if max(Counter(heads[list(used)].tolist()).values(), default=0) > 1:
                return False
    return True


@pytest.mark.parametrize("first", some_thorough(range(0, 300, SEEDS), range(300, 1500, SEEDS)))
def test_whole_flows_hold_what_the_evaluator_counts(first: int) -> None:
    """A point that keeps all memory rows is an answer that keeps the limit."""
    looked_at = 0
    for seed in range(first, first + SEEDS):
        problem = with_all_arcs(random_lives(seed), seed)
        program = build(problem).with_usage_rows(problem, all_steps(problem))
        x = MathOpt("HIGHS").minimise(program, Request()).x
        if x is None or not is_tree(problem, program, x):
            continue
        routes = program.arcs_of(x), program.routes_of(x)
        assignment = Router().routed(problem, program.choices_of(x), *routes)
        assert assignment is not None, seed
        assert evaluate(problem, *assignment).feasible, seed
        looked_at += 1
    assert looked_at > SEEDS / 3
