"""What copies of networks hold, against an oracle that tries every choice and every set of arcs."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from solver import (
    BACKENDS,
    Base,
    Consumer,
    Life,
    Load,
    Network,
    Node,
    Problem,
    ProblemError,
    Routes,
    Status,
    evaluate,
    solve,
)
from solver.evaluate import usage_timeline
from solver.reductions import Chain, reduce
from solver.reductions.equal import merge_equal_networks
from solver.reductions.reduction import Reduced

from ..thorough import some_thorough
from .random_problems import random_lives
from .test_networks import arc_sets

ONE = np.zeros(1, np.int64)
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


@pytest.mark.parametrize("first", some_thorough(range(0, 400, 50), range(50, 400, 100)))
def test_the_optimum_is_that_of_trying_everything(first: int) -> None:
    for seed in range(first, first + 50):
        problem = random_lives(seed)
        least, solution = brute_force(problem), solve(problem, backend="highs")
        assert solution.cost == least, seed
        assert solution.status is (Status.INFEASIBLE if least is None else Status.OPTIMAL), seed


@pytest.mark.parametrize("backend", EXACT)
def test_every_exact_backend_finds_it(backend: str) -> None:
    for seed in range(1000, 1025):
        problem = random_lives(seed)
        least, solution = brute_force(problem), solve(problem, backend=backend)
        assert solution.cost == least, seed
        assert least is None or solution.bound == least, seed


def test_trying_all_choices_with_cheapest_routes_alone_is_refused() -> None:
    with pytest.raises(ProblemError, match="choose another backend"):
        solve(problem_of(chain(), limit=5), backend="exhaustive")


def chain(**changes: object) -> Network:
    """Made at 0, wanted at 1 by a forward and a backward reader; the step there costs 5, a copy there holds 10."""
    way = {"tails": np.array([0]), "heads": np.array([1]), "costs": np.array([5])}
    readers = (Consumer(1, ONE + 1),), (Consumer(2, ONE + 1),)
    network = Network("t", 2, **way, producer=0, makes=ONE, forward=readers[0], backward=readers[1])
    lives = (Life(1, ((3, 4), (7, 8))),)
    return replace(network, **({"sizes": np.array([3, 10]), "lives": lives} | changes))


def problem_of(*networks: Network, limit: int | None = None) -> Problem:
    return Problem(tuple(Node(f"n{k}", ONE) for k in range(4)), (), usage_limit=limit, networks=networks)


KEPT, AGAIN = Routes((0,)), Routes((0,), (0,))


@pytest.mark.parametrize(
    ("network", "routes", "timeline"),
    [
        # what is made is there until the step before which it is moved, the copy while it is read, and kept in between
        (chain(), KEPT, [(1, 3), (3, 10), (8, 0)]),
        (chain(), AGAIN, [(1, 3), (3, 13), (4, 3), (7, 10), (8, 0)]),
        # a parameter is there anyway, and counted elsewhere
        (chain(held=True), KEPT, [(3, 10), (8, 0)]),
        (chain(held=True), AGAIN, [(3, 10), (4, 0), (7, 10), (8, 0)]),
        # without a copy in between it is made again though copies could be kept
        (chain(kept=False), AGAIN, [(1, 3), (3, 13), (4, 3), (7, 10), (8, 0)]),
    ],
)
def test_what_a_network_holds(network: Network, routes: Routes, timeline: list[tuple[int, int]]) -> None:
    assert usage_timeline(problem_of(network), (0, 0, 0, 0), (routes,)) == timeline


def test_a_view_holds_what_it_looks_at_and_nothing_of_its_own() -> None:
    """Node 1 makes a view of its copy at step 3, which node 3 reads at step 9."""
    base = chain(backward=(), lives=(Life(1, ((3, 4),)),))
    none = np.zeros(0, np.int64)
    view = Network("view", 1, none, none, none, 1, ONE, backward=(Consumer(3, ONE),))
    view = replace(view, sizes=ONE + 100, lives=(Life(3, ((9, 10),), Base(0, 0, 0)),))
    routes = Routes((0,)), Routes()
    assert usage_timeline(problem_of(base, view), (0, 0, 0, 0), routes) == [(1, 3), (3, 10), (10, 0)]


def test_a_copy_is_kept_where_memory_is_and_made_again_where_it_is_not() -> None:
    other = Load((5, 6), ONE + 4)
    costs = []
    for limit in (14, 13, 9):
        problem = problem_of(chain(), limit=limit)
        problem = replace(problem, nodes=(*problem.nodes[:3], Node("n3", ONE, further_loads=(other,))))
        costs.append(solve(problem, backend="highs").cost)
    assert costs == [5, 10, None]


def test_tied_tensors_hold_one_copy_each_at_its_own_time() -> None:
    """Two tied layers: 20 bytes while both copies are kept; one network after the reduction, with two lives."""
    first, second = chain(), chain(lives=(Life(2, ((4, 5), (6, 7))),))
    tied = second.between(lambda node, vertices: Consumer(node + 3, vertices))
    nodes = tuple(Node(f"n{k}", ONE) for k in range(6))
    problem = Problem(nodes, (), ties=((0, 3), (1, 4), (2, 5)), usage_limit=20, networks=(first, tied))
    reduced = reduce(problem)
    assert isinstance(reduced, Chain)
    assert [len(network.lives) for network in reduced.problem.networks] == [2]
    assert [solve(replace(problem, usage_limit=limit)).cost for limit in (20, 19, 16, 12)] == [10, 20, 20, None]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sizes": None}, "lives without sizes"),
        ({"sizes": np.array([1])}, "one size from 0 up for each of its 2 vertices"),
        ({"sizes": np.array([1, -1])}, "one size from 0 up"),
        ({"lives": (Life(1, ((3, 4),)),)}, "has 1 reads: one for each of its consumers"),
        ({"lives": (Life(4, ((3, 4), (7, 8))),)}, "made <= at <= until"),
        ({"lives": (Life(1, ((8, 9), (7, 8))),)}, "a read of the backward before one of the forward"),
    ],
)
def test_what_is_no_life_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        chain(**changes)


@pytest.mark.parametrize(
    ("base", "said"),
    [
        (Base(7, 0, 0), "the networks are 0 .. 1"),
        (Base(0, 1, 0), "which network 't' does not have"),
        (Base(0, 0, 1), "expected a consumer that is its producer"),
    ],
)
def test_what_a_view_cannot_look_at_is_refused(base: Base, said: str) -> None:
    none = np.zeros(0, np.int64)
    view = Network("view", 1, none, none, none, 1, ONE, backward=(Consumer(3, ONE),))
    with pytest.raises(ProblemError, match=said):
        problem_of(chain(), replace(view, sizes=ONE, lives=(Life(3, ((9, 10),), base),)))


def test_views_of_tied_layers_share_the_memory_of_one_network_in_whatever_order_they_come() -> None:
    none = np.zeros(0, np.int64)

    def layer(first: int, base: int) -> tuple[Network, Network]:
        at = 10 * first
        lives = (Life(at + 1, ((at + 3, at + 4),)),)
        held = chain(producer=first, forward=(Consumer(first + 1, ONE + 1),), backward=(), lives=lives)
        view = Network("view", 1, none, none, none, first + 1, ONE, backward=(Consumer(first + 2, ONE),))
        return held, replace(view, sizes=ONE + 100, lives=(Life(at + 3, ((at + 9, at + 10),), Base(base, 0, 0)),))

    (base, view), (base_after, view_after) = layer(0, 0), layer(3, 2)
    networks = base, view_after, base_after, view
    nodes = tuple(Node(f"n{k}", ONE) for k in range(6))
    problem = Problem(nodes, (), ties=((0, 3), (1, 4), (2, 5)), networks=networks, usage_limit=13)
    outcome = merge_equal_networks(problem)
    assert isinstance(outcome, Reduced) and len(outcome.problem.networks) == 2
    assert [len(network.lives) for network in outcome.problem.networks] == [2, 2]
    solution = solve(problem)
    assert solution.cost == 10 and solution.status is Status.OPTIMAL


@pytest.mark.parametrize(("reads", "networks"), [((2, 3), 1), ((2, 2), 2)])
def test_equal_tensors_are_one_network_where_they_are_read_apart(reads: tuple[int, int], networks: int) -> None:
    nodes = tuple(Node(name, np.array([0, 0])) for name in ("a", "b", "read a", "read b"))
    both = np.arange(2)
    held = tuple(
        Network("t", 2, ONE, ONE + 1, ONE + 5, k, both, (Consumer(k + 2, both),), sizes=both, lives=(life,))
        for k, life in enumerate(Life(0, ((at, at + 1),)) for at in reads)
    )
    problem = Problem(nodes, (), ties=((0, 1), (2, 3)), networks=held, usage_limit=10)
    outcome = merge_equal_networks(problem)
    merged = outcome.problem if isinstance(outcome, Reduced) else problem
    assert len(merged.networks) == networks


@pytest.mark.parametrize(("has_lives", "networks"), [(False, 1), (True, 2)])
def test_networks_at_multiples_of_a_price_are_one_where_nothing_is_held(has_lives: bool, networks: int) -> None:
    nodes = tuple(Node(name, np.array([0, 0])) for name in ("a", "b", "read a", "read b"))
    both, arcs = np.arange(2), np.array([0, 1])
    given = tuple(
        Network("t", 2, arcs, 1 - arcs, np.array(costs), k, both, (Consumer(k + 2, 1 - both),))
        for k, costs in enumerate(([4, 6], [10, 15]))
    )
    if has_lives:
        given = tuple(replace(each, sizes=both, lives=(Life(0, ((k + 2, k + 3),)),)) for k, each in enumerate(given))
    problem = Problem(nodes, (), ties=((0, 1), (2, 3)), networks=given, usage_limit=10 if has_lives else None)
    outcome = merge_equal_networks(problem)
    merged = outcome.problem if isinstance(outcome, Reduced) else problem
    assert len(merged.networks) == networks
    assert sum(network.costs for network in merged.networks).tolist() == [14, 21]
    assert solve(problem).cost == 0  # where it is made it may be wanted: nothing is moved
