"""Dual ascent on networks and what is dropped by it, against all assignments of small problems."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from solver import Assignment, Network, Problem, Status, evaluate, solve
from solver.backends import fixing
from solver.backends.arborescence import FAR, Arborescence, Ways
from solver.backends.backend import Answer, Request
from solver.backends.fixing import is_of_networks, run_fixing
from solver.backends.network_ascent import NetworkAscent
from solver.reductions import Chain, reduce
from solver.routing import Router, cheapest_routes

from .random_problems import random_networks

ALL = 1.0  # of a small problem little is dropped


def reduced(seeds: int) -> Iterator[Problem]:
    """Random problems as backends get them, those that are of networks alone."""
    for seed in range(seeds):
        chain = reduce(random_networks(seed))
        if isinstance(chain, Chain) and chain.problem.nodes and is_of_networks(chain.problem):
            yield chain.problem


def assignments(problem: Problem) -> Iterator[tuple[Assignment, int]]:
    """Everything that can be chosen, with its cheapest routes and cost."""
    router = Router()
    for choices in product(*(range(len(node.costs)) for node in problem.nodes)):
        found = router.routed(problem, choices)
        if found is not None:
            judged = evaluate(problem, *found)
            if judged.feasible:
                yield found, judged.cost


def test_the_least_cost_of_routes_with_free_ends_is_that_of_the_best_ends() -> None:
    rng = random.Random(0)
    reached = 0
    for _ in range(200):
        vertices, count, consumers = rng.randint(2, 6), rng.randint(1, 12), rng.randint(1, 3)
        tails, heads = (np.array(rng.choices(range(vertices), k=count)) for _ in range(2))
        costs = np.array(rng.choices(range(9), k=count))
        ends = [np.array(sorted(rng.sample(range(vertices), rng.randint(1, 2)))) for _ in range(1 + consumers)]
        prices = [np.array(rng.choices(range(-5, 9), k=len(end)), np.float64) for end in ends]
        ways = Ways(tails, heads, costs.astype(float)), Ways(heads, tails, costs.astype(float))
        routes = Arborescence(vertices, *ways, len(ends))
        for end, (where, price) in enumerate(zip(ends, prices)):
            routes.price(end, where, price)
        network = Network("w", vertices, tails, heads, costs, 0, np.zeros(1, np.int64))
        costs_of: dict[tuple[int, ...], float] = {}
        arcs = np.full(count, np.inf)
        for chosen in product(*(range(len(end)) for end in ends)):
            at = [int(end[k]) for end, k in zip(ends, chosen)]
            taken = cheapest_routes(network, at[0], frozenset(at[1:]) - {at[0]}, frozenset())
            if taken is not None:
                paid = sum(price[k] for price, k in zip(prices, chosen))
                costs_of[chosen] = sum(costs[list(taken.forward)].tolist()) + paid
                arcs[list(taken.forward)] = np.minimum(arcs[list(taken.forward)], costs_of[chosen])
        for end, where in enumerate(ends):
            for k, vertex in enumerate(where.tolist()):
                best = min((cost for chosen, cost in costs_of.items() if chosen[end] == k), default=FAR)
                least = routes.least(end)[vertex]
                assert least >= FAR / 2 if best == FAR else least + prices[end][k] == pytest.approx(best)
                reached += best < FAR
        assert (routes.through(tails, heads, costs.astype(float)) <= arcs + 1e-9).all()
    assert reached > 500


def test_no_assignment_costs_less_than_the_ascent_says_of_it_its_strategies_and_its_arcs() -> None:
    proven = seen = 0
    for problem in reduced(300):
        ascent = NetworkAscent(problem)
        ascent.run(lambda bound: False)
        found = list(assignments(problem))
        if ascent.is_impossible:
            assert not found
            continue
        at_least = [np.full(len(node.costs), np.inf) for node in problem.nodes]
        for limit in sorted({cost for _, cost in found}):
            for kept, least in zip(ascent.strategies(limit), at_least):
                least[kept] = np.minimum(least[kept], limit)
        arcs = ascent.arcs()
        best = min(cost for _, cost in found)
        for assignment, cost in found:
            assert ascent.bound <= cost + 1e-6
            assert all(least[choice] <= cost for least, choice in zip(at_least, assignment.choices))
            for least, taken in zip(arcs, assignment.routes):
                assert (least[[*taken.forward, *taken.backward]] <= cost + 1e-6).all()
        seen += 1
        proven += ascent.bound > best - 1e-6
    assert seen > 100 and proven > 0.85 * seen


@pytest.mark.parametrize("early", [fixing.MOST_EARLY, 0], ids=["on the way", "at the end"])
def test_fixing_finds_the_optimum_and_proves_it(early: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixing, "MOST_EARLY", early)
    seen = 0
    for problem in reduced(400):
        best = min((cost for _, cost in assignments(problem)), default=None)
        answer = run_fixing(problem, Request(), ALL)
        assert answer is not None
        assert answer.infeasible == (best is None)
        if best is not None:
            assert answer.assignment is not None and evaluate(problem, *answer.assignment).cost == best == answer.bound
        seen += 1
    assert seen > 150


def test_a_start_is_kept_where_nothing_is_cheaper() -> None:
    seen = 0
    for problem in reduced(200):
        found = sorted(assignments(problem), key=lambda each: each[1])
        for start, _ in found[:: max(1, len(found) // 4)]:
            answer = run_fixing(problem, Request(start=start), ALL)
            assert answer is not None and answer.assignment is not None
            assert evaluate(problem, *answer.assignment).cost == answer.bound == found[0][1]
            seen += 1
    assert seen > 200


def test_nothing_is_proved_by_a_program_of_what_is_left_that_time_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ended(*args: object) -> Answer:
        asked.append(args)
        return Answer()

    monkeypatch.setattr(fixing, "run_lazily", ended)
    monkeypatch.setattr(fixing, "EARLY", 10.0)
    monkeypatch.setattr(fixing, "NEAR", 10.0)
    for problem in reduced(400):
        found = sorted(assignments(problem), key=lambda each: each[1])
        for start in (None, found[-1][0]) if found else ():
            answer = run_fixing(problem, Request(start=start), ALL)
            assert answer is not None and answer.bound is not None and answer.bound <= found[0][1]
    assert len(asked) > 20


def test_what_cannot_be_below_the_cutoff_is_cut_and_all_else_is_solved() -> None:
    cut = solved = 0
    for seed in range(300):
        problem = random_networks(seed)
        best = solve(problem).cost
        if best is None:
            continue
        for cutoff in (best - 3, best, best + 1):
            solution = solve(problem, cutoff=cutoff)
            if solution.status is Status.CUT:
                assert solution.choices is None and solution.bound is not None and cutoff <= solution.bound <= best
                cut += 1
            else:
                assert solution.status is Status.OPTIMAL and solution.cost == best
                solved += 1
    assert cut > 20 and solved > 100
