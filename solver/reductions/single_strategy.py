"""A node with one strategy is a constant: its edges become costs of its neighbours.

Exact because the price of an edge then depends on the other end alone. A consumer in a group always pays for its
column: the producer takes that price over, and the column costs nothing for the rest of the group. The producer of a
group of several consumers stays, since its group prices the choices of all of them together, and so do the nodes of
networks. What constants use over
time is collected in one node, the background.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..problem import INFEASIBLE, Edge, Group, IntArray, Load, Node, Problem, add_costs, identity
from .reduction import Contradiction, Outcome, Reduced, Substitution, renumbered

BACKGROUND = "background"


def fold_single_strategies(problem: Problem) -> Outcome:
    """The problem without nodes that have one strategy, but for producers of groups and one background node."""
    needed = {problem.edges[group.edges[0]].u for group in problem.groups}
    needed |= {node for network in problem.networks for node, _ in network.ends}
    single = [len(node.costs) == 1 and index not in needed for index, node in enumerate(problem.nodes)]
    folded = [index for index, gone in enumerate(single) if gone]
    if not folded:
        return None
    loaded = any(problem.nodes[index].loads for index in folded)
    if loaded and len(folded) == 1 and not any(edge.u == folded[0] or edge.v == folded[0] for edge in problem.edges):
        return None
    return _Fold(problem, single, loaded).reduced()


class _Fold:
    def __init__(self, problem: Problem, single: list[bool], loaded: bool) -> None:
        self.problem = problem
        self.single = single
        self.extra: list[list[IntArray]] = [[] for _ in problem.nodes]
        kept = [index for index, gone in enumerate(single) if not gone]
        self.number = {index: position for position, index in enumerate(kept)}
        self.background = len(kept) if loaded else -1
        self.edges: list[Edge] = []
        self.groups: list[Group] = []

    def reduced(self) -> Reduced | Contradiction:
        problem = self.problem
        for index, edge in enumerate(problem.edges):
            if index not in problem.grouped:
                self._edge(edge)
        for group in problem.groups:
            self._group([problem.edges[index] for index in group.edges])
        offset = problem.offset
        loads: list[Load] = []
        nodes = []
        for index, node in enumerate(problem.nodes):
            costs = add_costs([node.costs, *self.extra[index]])
            if not self.single[index]:
                nodes.append(Node(node.name, costs, further_loads=node.loads))
            elif costs[0] >= INFEASIBLE:
                return Contradiction(f"the only strategy left of {node.name!r} is forbidden or has an absent pair")
            else:
                offset += int(costs[0])
                loads.extend(node.loads)
        if self.background >= 0:
            nodes.append(Node(BACKGROUND, np.zeros(1, np.int64), further_loads=tuple(loads)))
        smaller = replace(
            problem,
            nodes=tuple(nodes),
            edges=tuple(self.edges),
            groups=tuple(self.groups),
            offset=offset,
            networks=renumbered(problem.networks, self.number),
        )
        owners = [self.number.get(index, -1) for index in range(len(problem.nodes))]
        return Reduced(smaller, Substitution(owners, [identity(len(node.costs)) for node in problem.nodes], len(nodes)))

    def _edge(self, edge: Edge) -> None:
        if self.single[edge.u]:
            self.extra[edge.v].append(edge.costs[edge.rows[0], edge.cols])
        elif self.single[edge.v]:
            self.extra[edge.u].append(edge.costs[edge.rows, edge.cols[0]])
        else:
            self._keep(edge, edge.costs)

    def _group(self, edges: list[Edge]) -> None:
        first = edges[0]
        paid = sorted({int(edge.cols[0]) for edge in edges if self.single[edge.v]})
        for column in paid:
            self.extra[first.u].append(first.costs[first.rows, column])
        costs = first.costs
        if paid:
            costs = costs.copy()
            costs[:, paid] = np.where(costs[:, paid] >= INFEASIBLE, INFEASIBLE, 0)
        kept = [self._keep(edge, costs) for edge in edges if not self.single[edge.v]]
        if kept:
            self.groups.append(Group(tuple(kept)))

    def _keep(self, edge: Edge, costs: IntArray) -> int:
        self.edges.append(Edge(self.number[edge.u], self.number[edge.v], edge.rows, edge.cols, costs))
        return len(self.edges) - 1
