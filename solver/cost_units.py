"""Costs so large that their sums do not fit int64 are solved in a larger unit.

With every finite cost rounded down to a multiple of the unit, an assignment costs no more than before, so a lower bound
of the coarse problem times the unit is one of the problem. The answer itself is judged at its exact cost, and is called
optimal only where the bound reaches it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .problem import INFEASIBLE, Edge, IntArray, Node, Problem

LARGEST_TOTAL = 2**58
"""Largest sum of the largest costs of all nodes, edges and networks: what reductions add up stays far within int64."""


def cost_unit(problem: Problem) -> int:
    """1, or the power of two in which the largest total of the problem's costs stays within LARGEST_TOTAL."""
    largest: dict[int, int] = {}
    total = abs(problem.offset)
    for costs in (*(node.costs for node in problem.nodes), *(edge.costs for edge in problem.edges)):
        if id(costs) not in largest:
            largest[id(costs)] = int(np.abs(costs[costs < INFEASIBLE]).max(initial=0))
        total += largest[id(costs)]
    sums: dict[int, int] = {}
    for network in problem.networks:
        if id(network.costs) not in sums:
            sums[id(network.costs)] = sum(network.costs.tolist())
        total += sums[id(network.costs)] * (1 if network.kept else 2)
    if problem.usage_price is not None:
        most = sum(int(usages.max()) for node in problem.nodes for _, usages in node.loads)
        total += problem.usage_price * most
    return 1 if total <= LARGEST_TOTAL else 1 << (total // LARGEST_TOTAL).bit_length()


def in_units(problem: Problem, unit: int) -> Problem:
    """The problem with its costs divided by the unit, rounded down."""
    if unit == 1:
        return problem
    known: dict[int, IntArray] = {}

    def divided(costs: IntArray) -> IntArray:
        if id(costs) not in known:
            known[id(costs)] = np.where(costs >= INFEASIBLE, INFEASIBLE, costs // unit)
        return known[id(costs)]

    networks = tuple(replace(network, costs=divided(network.costs)) for network in problem.networks)
    nodes = tuple(Node(node.name, divided(node.costs), further_loads=node.loads) for node in problem.nodes)
    edges = tuple(Edge(edge.u, edge.v, edge.rows, edge.cols, divided(edge.costs)) for edge in problem.edges)
    price = None if problem.usage_price is None else problem.usage_price // unit
    return replace(
        problem, nodes=nodes, edges=edges, offset=problem.offset // unit, usage_price=price, networks=networks
    )
