"""Networks against an oracle that knows no routing: every assignment, and for each every set of arcs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solver import (
    BACKENDS,
    INFEASIBLE,
    Assignment,
    Consumer,
    Edge,
    Group,
    Network,
    Node,
    Problem,
    ProblemError,
    Routes,
    Status,
    evaluate,
    solve,
)
from solver.backends import Request
from solver.backends.exhaustive import Exhaustive
from solver.routing import MOST_TARGETS, cheapest_routes, routed

from ..thorough import tries
from .random_problems import random_networks

SEEDS = st.integers(0, 10**9)
EXACT = [name for name, entry in BACKENDS.items() if entry.available and name != "decomposition"]
ONE, TWO = np.zeros(1, np.int64), np.zeros(2, np.int64)


# The oracle: no shortest paths, no flows; sets of arcs and what they reach.


def cheapest(network: Network, choices: tuple[int, ...]) -> int | None:
    """The least cost of routes, by trying every set of arcs in each phase."""
    source = int(network.makes[choices[network.producer]])
    forward, backward = (
        frozenset(int(wants[choices[node]]) for node, wants in consumers)
        for consumers in (network.forward, network.backward)
    )
    sets = list(arc_sets(len(network.costs)))

    @cache
    def least(start: frozenset[int], wanted: frozenset[int]) -> int | None:
        fitting = (arcs for arcs in sets if wanted <= reach(network, start, arcs))
        return min((cost(network, arcs) for arcs in fitting), default=None)

    found = []
    for arcs in sets:
        there = reach(network, frozenset([source]), arcs)
        again = least(there if network.kept else frozenset([source]), backward)
        if forward <= there and again is not None:
            found.append(cost(network, arcs) + again)
    return min(found, default=None)


def arc_sets(count: int) -> Iterator[tuple[int, ...]]:
    for size in range(count + 1):
        yield from combinations(range(count), size)


def cost(network: Network, arcs: tuple[int, ...]) -> int:
    return sum(int(network.costs[arc]) for arc in arcs)


def reach(network: Network, start: frozenset[int], arcs: tuple[int, ...]) -> frozenset[int]:
    there = set(start)
    for _ in arcs:
        there |= {int(network.heads[arc]) for arc in arcs if int(network.tails[arc]) in there}
    return frozenset(there)


def brute_force(problem: Problem) -> int | None:
    """The least cost of all; None where there is no assignment."""
    known: dict[object, int | None] = {}
    best: int | None = None
    bare = replace(problem, networks=())
    for choices in product(*(range(len(node.costs)) for node in problem.nodes)):
        judged = evaluate(bare, choices)
        if not judged.feasible:
            continue
        costs = []
        for index, network in enumerate(problem.networks):
            key = index, tuple(int(vertices[choices[node]]) for node, vertices in network.ends)
            if key not in known:
                known[key] = cheapest(network, choices)
            costs.append(known[key])
        total = None if None in costs else judged.cost + sum(each or 0 for each in costs)
        if total is not None and (best is None or total < best):
            best = total
    return best


@settings(max_examples=tries(1000))
@given(seed=SEEDS)
def test_cheapest_routes_cost_what_the_cheapest_sets_of_arcs_do(seed: int) -> None:
    problem = random_networks(seed)
    rng = np.random.default_rng(seed)
    choices = tuple(int(rng.integers(len(node.costs))) for node in problem.nodes)
    for network in problem.networks:
        alone = replace(problem, nodes=tuple(Node("", node.costs * 0) for node in problem.nodes), networks=(network,))
        alone = replace(alone, ties=())
        found, least = routed(alone, choices), cheapest(network, choices)
        assert (found is None) == (least is None)
        if found is not None:
            judged = evaluate(alone, *found)
            assert judged.feasible and judged.cost == least


@settings(max_examples=tries(250))
@given(seed=SEEDS)
def test_the_optimum_is_that_of_trying_all_choices_and_all_sets_of_arcs(seed: int) -> None:
    problem = random_networks(seed)
    least, solution = brute_force(problem), solve(problem, backend="highs")
    assert solution.cost == least
    assert solution.status is (Status.INFEASIBLE if least is None else Status.OPTIMAL)
    if solution.choices is not None:
        assert evaluate(problem, solution.choices, solution.routes).cost == least


@pytest.mark.parametrize("backend", EXACT)
@settings(max_examples=tries(60))
@given(seed=SEEDS)
def test_every_exact_backend_finds_the_optimum_of_networks(backend: str, seed: int) -> None:
    problem = random_networks(seed)
    least, solution = brute_force(problem), solve(problem, backend=backend)
    assert (solution.cost, solution.bound) == (least, least)
    assert solution.status is (Status.INFEASIBLE if least is None else Status.OPTIMAL)


@settings(max_examples=tries(60))
@given(seed=SEEDS)
def test_the_decomposition_encloses_the_optimum_of_networks(seed: int) -> None:
    problem = random_networks(seed)
    least, solution = brute_force(problem), solve(problem, backend="decomposition")
    if least is None:
        assert solution.status is Status.INFEASIBLE
    else:
        assert solution.cost is not None and solution.bound is not None
        assert solution.bound <= least <= solution.cost


# The pair form: a matrix of shortest ways between the producer and each consumer.


def ways(network: Network) -> np.ndarray:
    """(V, V) by Floyd and Warshall."""
    between = np.where(np.eye(network.vertices, dtype=bool), 0, INFEASIBLE)
    for tail, head, price in zip(network.tails, network.heads, network.costs, strict=True):
        between[tail, head] = min(between[tail, head], price)
    for via in range(network.vertices):
        between = np.minimum(between, between[:, via, None] + between[None, via, :])
    return np.minimum(between, INFEASIBLE)


def pair_form(problem: Problem) -> Problem:
    """Every network as edges, in a group for the consumers that share; a producer that is a consumer pays itself."""
    nodes, edges, groups = list(problem.nodes), list[Edge](), list[Group]()
    for network in problem.networks:
        matrix = ways(network)
        phases = [network.consumers] if network.kept else [network.forward, network.backward]
        for consumers in phases:
            first = len(edges)
            for node, wants in consumers:
                if node == network.producer:
                    price = np.minimum(nodes[node].costs + matrix[network.makes, wants], INFEASIBLE)
                    nodes[node] = Node(nodes[node].name, price)
                else:
                    edges.append(Edge(network.producer, node, network.makes, wants, matrix))
            if len(edges) > first:
                groups.append(Group(tuple(range(first, len(edges)))))
    return replace(problem, nodes=tuple(nodes), edges=tuple(edges), groups=tuple(groups), networks=())


@settings(max_examples=tries(250))
@given(seed=SEEDS)
def test_where_each_phase_has_one_consumer_a_network_costs_what_its_pairs_do(seed: int) -> None:
    problem = random_networks(seed)
    lone = tuple(
        replace(network, forward=network.forward[:1], backward=network.backward[:1], kept=False)
        for network in problem.networks
    )
    problem = replace(problem, networks=lone)
    assert brute_force(problem) == Exhaustive().run(pair_form(problem), Request()).bound
    assert solve(problem, backend="highs").cost == solve(pair_form(problem), backend="highs").cost


@settings(max_examples=tries(250))
@given(seed=SEEDS)
def test_a_network_never_costs_more_than_pairs_that_share_what_is_equal(seed: int) -> None:
    problem = random_networks(seed)
    network, pairs = solve(problem, backend="highs"), solve(pair_form(problem), backend="highs")
    assert (network.cost is None) == (pairs.cost is None)
    assert network.cost is None or pairs.cost is None or network.cost <= pairs.cost


# Worked by hand


def gathered(kept: bool = True) -> Problem:
    """Made whole over two axes' shards (0); gathered over one it is 1 (cost 5), over the other too it is 2 or 3 (3)."""
    network = Network(
        "t",
        4,
        np.array([0, 1, 1]),
        np.array([1, 2, 3]),
        np.array([5, 3, 3]),
        0,
        ONE,
        forward=(Consumer(1, ONE + 2), Consumer(2, ONE + 3)),
        backward=(Consumer(3, ONE + 1),),
        kept=kept,
    )
    return Problem(tuple(Node(name, ONE) for name in "uvwb"), (), networks=(network,))


def test_the_common_part_of_two_ways_is_paid_once() -> None:
    solution = solve(gathered())
    assert solution.cost == 5 + 3 + 3  # pairs would pay 8 + 8, and 5 again
    assert solution.routes == (Routes((0, 1, 2), ()),)


def test_what_is_not_kept_is_made_again_in_the_backward() -> None:
    solution = solve(gathered(kept=False))
    assert solution.cost == 5 + 3 + 3 + 5
    assert solution.routes == (Routes((0, 1, 2), (0,)),)


def test_arcs_that_do_not_lead_to_a_consumer_are_a_violation() -> None:
    problem, choices = gathered(), (0, 0, 0, 0)
    judged = evaluate(problem, choices, [Routes((1, 2), (0,))])
    assert judged.violations == (
        "no forward route of network 't' reaches vertex 2, where node 1 wants it",
        "no forward route of network 't' reaches vertex 3, where node 2 wants it",
    )
    assert judged.cost == 3 + 3 + 5 + 2 * INFEASIBLE


def test_the_backward_may_not_start_from_what_was_not_kept() -> None:
    routes = [Routes((0, 1, 2), ())]
    assert evaluate(gathered(), (0, 0, 0, 0), routes).feasible
    assert not evaluate(gathered(kept=False), (0, 0, 0, 0), routes).feasible


def test_what_nobody_can_reach_is_infeasible_and_no_error() -> None:
    network = Network("t", 2, TWO[:0], TWO[:0], TWO[:0], 0, ONE, forward=(Consumer(1, ONE + 1),))
    problem = Problem((Node("u", ONE), Node("v", ONE)), (), networks=(network,))
    for backend in EXACT:
        assert solve(problem, backend=backend).status is Status.INFEASIBLE


def fan(targets: int, rng: np.random.Generator) -> Problem:
    """One tensor that so many consumers want at vertices of their own, from a grid of arcs."""
    vertices = 3 * targets
    tails, heads = (rng.integers(0, vertices, 6 * vertices) for _ in range(2))
    spine = np.arange(vertices - 1)
    network = Network(
        "t",
        vertices,
        np.concatenate([tails, spine]),
        np.concatenate([heads, spine + 1]),
        np.concatenate([rng.integers(3, 20, 6 * vertices), np.full(vertices - 1, 9)]),
        0,
        ONE,
        forward=tuple(Consumer(1 + k, ONE + 3 * k + 2) for k in range(targets)),
    )
    return Problem(tuple(Node(f"n{k}", ONE) for k in range(targets + 1)), (), networks=(network,))


@pytest.mark.parametrize("seed", range(3))
def test_many_consumers_are_routed_as_the_solver_proves_cheapest(seed: int) -> None:
    """More than the exact search of routes takes: the arcs that the solver used are among what is tried."""
    problem = fan(MOST_TARGETS + 4, np.random.default_rng(seed))
    solution, alone = solve(problem, backend="highs"), routed(problem, (0,) * len(problem.nodes))
    assert solution.status is Status.OPTIMAL
    assert alone is not None and solution.cost is not None
    assert solution.cost <= evaluate(problem, *alone).cost


@pytest.mark.parametrize("targets", [2, 5, MOST_TARGETS])
def test_the_exact_search_of_routes_agrees_with_the_solver(targets: int) -> None:
    for seed in range(5):
        problem = fan(targets, np.random.default_rng(seed))
        alone = routed(problem, (0,) * len(problem.nodes))
        assert alone is not None and evaluate(problem, *alone).cost == solve(problem, backend="highs").cost


def test_a_start_without_routes_is_given_cheapest_ones() -> None:
    problem = gathered()
    assert solve(problem, start=[0, 0, 0, 0], time_limit_s=1e-9).cost == 11
    dear = Assignment((0, 0, 0, 0), (Routes((0, 1, 2), (0,)),))
    assert solve(problem, start=dear, time_limit_s=1e-9).cost in (11, 16)


@pytest.mark.parametrize(
    ("routes", "text"),
    [
        ([], "0 pairs of routes for 1 networks"),
        ([Routes((1, 0), ())], "forward routes of network 't'"),
        ([Routes((), (3,))], "backward routes of network 't'"),
        ([Routes((0, 0), ())], "ascending"),
    ],
)
def test_routes_must_name_arcs_of_their_network(routes: list[Routes], text: str) -> None:
    with pytest.raises(ProblemError, match=text):
        evaluate(gathered(), (0, 0, 0, 0), routes)


def test_unreachable_targets_have_no_routes() -> None:
    network = gathered().networks[0]
    assert cheapest_routes(network, 2, frozenset([0]), frozenset()) is None


@settings(max_examples=tries(200))
@given(seed=SEEDS)
def test_the_network_of_another_tensor_is_what_would_be_made_and_checked(seed: int) -> None:
    for network in random_networks(seed).networks:
        nodes = [node + 7 for node, _ in network.ends]
        found = network.of_tensor("other", nodes)
        assert [node for node, _ in found.ends] == nodes
        moved = [
            tuple(Consumer(node + 7, wants) for node, wants in ends) for ends in (network.forward, network.backward)
        ]
        again = None if network.again is None else Consumer(network.again.node + 7, network.again.wants)
        changes = {"name": "other", "producer": network.producer + 7, "forward": moved[0], "backward": moved[1]}
        made = replace(network, **changes, again=again, lives=(), sizes=None)
        for each in fields(Network):
            one, other = getattr(found, each.name), getattr(made, each.name)
            assert repr(one) == repr(other)
