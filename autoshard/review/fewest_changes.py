"""Of all cheapest plans the one that changes fewest decisions of another.

Optimal plans are seldom unique, and a solver returns any of them. A person who asks what one change entails wants the
plan in which as little as possible is different.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from solver import INFEASIBLE, Assignment, Edge, Node, Problem, Solution, evaluate, routed
from solver.solution import relative_gap

from ..planning import Formulation, Planner, solve

LARGEST_COST = 1 << 50
"""Of a scaled problem: solvers compute with doubles, which hold whole numbers up to 2^53."""


def cheapest_nearest(planner: Planner, formulation: Formulation, wanted: Sequence[int | None]) -> Solution:
    """The cheapest solution of a program, of several the one that keeps most of the choices wanted.

    What keeps all of them is tried first: where nothing is cheaper, nothing is nearer.

    Raises:
        InfeasibleError: there is none, or none was found in the time given.
    """
    problem = formulation.problem
    kept = _kept(planner, problem, wanted)
    solution = planner.solve(formulation, start=kept)
    if kept is not None and evaluate(problem, *kept).cost == solution.cost:
        return replace(solution, choices=kept.choices, routes=kept.routes)
    return with_fewest_changes(planner, problem, solution, wanted)


def _kept(planner: Planner, problem: Problem, wanted: Sequence[int | None]) -> Assignment | None:
    """The cheapest assignment that keeps all choices wanted; None where there is none."""
    known = {node: 0 for node, each in enumerate(problem.nodes) if len(each.costs) == 1}
    known |= {node: choice for node, choice in enumerate(wanted) if choice is not None}
    if len(known) == len(problem.nodes):
        assignment = routed(problem, [known[node] for node in range(len(problem.nodes))])
        return assignment if assignment and evaluate(problem, *assignment).feasible else None
    fixed = replace(problem, fixed={**problem.fixed, **known})
    found = solve(fixed, backend=planner.backend, time_limit_s=planner.time_limit_s, explains=False)
    return None if found.choices is None else Assignment(found.choices, found.routes)


def with_fewest_changes(
    planner: Planner, problem: Problem, solution: Solution, wanted: Sequence[int | None]
) -> Solution:
    """A solution of the same cost that keeps as many as possible of the choices wanted.

    The costs are multiplied by one more than the number of nodes, and every choice that is not the one wanted costs 1:
    an optimum of that is the cheapest, and among the cheapest the nearest. Solved from ``solution`` on, so never worse;
    where the scaled costs would be too large for exact arithmetic, ``solution`` itself is given back.

    Args:
        solution: one of the problem, with choices.
        wanted: the choice of each node that is to be kept, None for none.
    """
    assert solution.choices is not None and solution.cost is not None
    scale = len(problem.nodes) + 1
    if (abs(solution.cost) + 1) * scale > LARGEST_COST:
        return solution
    scaled = _scaled(problem, scale, wanted, solution.cost)
    if scaled is None:
        return solution
    found = solve(scaled, backend=planner.backend, time_limit_s=planner.time_limit_s, start=solution.choices)
    if found.choices is None:
        return solution
    cost = evaluate(problem, found.choices, found.routes).cost
    if cost > solution.cost:
        return solution
    gap = relative_gap(cost, solution.bound)
    return replace(solution, choices=found.choices, routes=found.routes, cost=cost, gap=gap)


def count_changes(wanted: Sequence[int | None], choices: Sequence[int]) -> int:
    """How many choices are not those wanted."""
    return sum(one is not None and one != other for one, other in zip(wanted, choices))


def _scaled(problem: Problem, scale: int, wanted: Sequence[int | None], most: int) -> Problem | None:
    """The problem with costs multiplied, arcs dearer than ``most`` being as dear as that; None where it would be too
    large for exact arithmetic.
    """
    known: dict[tuple[int, int | None], np.ndarray] = {}

    def times(costs: np.ndarray, keep: int | None = None) -> np.ndarray:
        """Costs times ``scale``, plus 1 for every choice but ``keep``. Costs too large to multiply become absent: no
        cheapest assignment pays them.
        """
        key = (id(costs), keep)
        if key not in known:
            fits = np.abs(costs) <= LARGEST_COST // scale
            known[key] = np.where(fits, np.where(fits, costs, 0) * scale, INFEASIBLE)
            if keep is not None:
                changed = np.arange(len(costs)) != keep
                known[key] = np.where(fits & changed, known[key] + 1, known[key])
        return known[key]

    nodes = tuple(
        Node(node.name, times(node.costs, keep), further_loads=node.loads) for node, keep in zip(problem.nodes, wanted)
    )
    edges = tuple(Edge(edge.u, edge.v, edge.rows, edge.cols, times(edge.costs)) for edge in problem.edges)
    arcs: dict[int, np.ndarray] = {}
    for network in problem.networks:
        dearest = min(int(network.costs.max(initial=0)), most + 1)
        if dearest * scale * len(network.costs) >= INFEASIBLE:
            return None
        if id(network.costs) not in arcs:
            arcs[id(network.costs)] = np.minimum(network.costs, most + 1) * scale
    networks = tuple(replace(network, costs=arcs[id(network.costs)]) for network in problem.networks)
    price = None if problem.usage_price is None else problem.usage_price * scale
    offset = problem.offset * scale
    return replace(problem, nodes=nodes, edges=edges, networks=networks, offset=offset, usage_price=price)
