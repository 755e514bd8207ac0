"""What copies of networks hold, against an oracle that tries every choice and every set of arcs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from solver import BACKENDS, Problem, Routes, Status, evaluate, solve

from .random_problems import random_lives
from .test_networks import arc_sets

SEEDS = st.integers(0, 10**9)
EXACT = [name for name, entry in BACKENDS.items() if entry.available and name not in ("decomposition", "exhaustive")]


def brute_force(problem: Problem) -> int | None:
    """The least cost of all choices and all sets of arcs, by the evaluator; None where none is feasible."""
    best: int | None = None
    sets = [list(arc_sets(len(network.costs))) for network in problem.networks]
    for choices in product(*(range(len(node.costs)) for node in problem.nodes)):
        for routes in product(
            *(sensible(problem, index, choices, sets[index]) for index in range(len(problem.networks)))
        ):
            judged = evaluate(problem, choices, routes)
            if judged.feasible and (best is None or judged.cost < best):
                best = judged.cost
    return best


def sensible(problem: Problem, index: int, choices: tuple[int, ...], sets: list[tuple[int, ...]]) -> list[Routes]:
    """The routes of one network that lead where they should; of the forward none without use there."""
    network = replace(problem.networks[index], sizes=None, lives=(), held=False)
    alone = Problem(problem.nodes, (), networks=(network,))
    of_forward = Problem(problem.nodes, (), networks=(replace(network, backward=()),))

    def leads(problem: Problem, routes: Routes) -> bool:
        return evaluate(problem, choices, (routes,)).feasible

    there = [arcs for arcs in sets if leads(of_forward, Routes(arcs))]
    least = [arcs for arcs in there if not any(set(other) < set(arcs) for other in there)]
    return [routes for first in least for again in sets if leads(alone, routes := Routes(first, again))]


@settings(max_examples=150)
@given(seed=SEEDS)
def test_the_optimum_is_that_of_trying_everything(seed: int) -> None:
    problem = random_lives(seed)
    least, solution = brute_force(problem), solve(problem, backend="highs")
    assert solution.cost == least
    assert solution.status is (Status.INFEASIBLE if least is None else Status.OPTIMAL)
