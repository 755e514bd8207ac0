"""Tied nodes become one node.

Exact because all nodes of a class choose the same index: their costs add up and their loads stay side by side, each in
its own interval. An edge between two nodes of a class keeps only its diagonal and folds into the node's cost. Where
such an edge shares its price with a group that cannot be said in the node's cost, so the consumer becomes a copy of
the class: a node without costs that an edge of absent pairs holds to the same choice. The networks of tied tensors come
to join the same nodes, and `merge_equal_networks` makes one of them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..problem import INFEASIBLE, Edge, Group, IntArray, Load, Node, Problem, add_costs, identity
from .reduction import Contradiction, Outcome, Reduced, Substitution


def merge_ties(problem: Problem) -> Outcome:
    """The problem with one node per class of tied nodes."""
    if not problem.ties:
        return None
    first_of = list(range(len(problem.nodes)))
    for tie in problem.ties:
        for node in tie:
            first_of[node] = min(tie)
    for tie in problem.ties:
        asked = {problem.fixed[node] for node in tie if node in problem.fixed}
        if len(asked) > 1:
            return Contradiction(f"tied nodes are fixed to the different strategies {sorted(asked)}")
    kept = [node for node, first in enumerate(first_of) if node == first]
    number = {node: index for index, node in enumerate(kept)}
    owners = [number[first] for first in first_of]
    return _Merge(problem, owners, len(kept)).reduced()


class _Merge:
    def __init__(self, problem: Problem, owners: list[int], count: int) -> None:
        self.problem = problem
        self.owners = owners
        self.count = count
        self.costs: list[list[IntArray]] = [[] for _ in range(count)]
        self.loads: list[list[Load]] = [[] for _ in range(count)]
        self.names = [""] * count
        self.edges: list[Edge] = []
        self.copies: dict[int, int] = {}

    def reduced(self) -> Reduced:
        problem = self.problem
        for owner, node in zip(self.owners, problem.nodes, strict=True):
            self.costs[owner].append(node.costs)
            self.loads[owner].extend(node.loads)
            self.names[owner] = self.names[owner] or node.name
        group_of = {edge: index for index, group in enumerate(problem.groups) for edge in group.edges}
        members: list[list[int]] = [[] for _ in problem.groups]
        for index, edge in enumerate(problem.edges):
            self._edge(edge, members[group_of[index]] if index in group_of else None)
        groups = tuple(Group(tuple(edges)) for edges in members)
        nodes = [
            Node(name, add_costs(costs), further_loads=tuple(loads))
            for name, costs, loads in zip(self.names, self.costs, self.loads, strict=True)
        ]
        for owner in self.copies:
            size = len(nodes[owner].costs)
            nodes.append(Node(f"{self.names[owner]} (copy)", np.zeros(size, np.int64)))
        fixed = {self.owners[node]: strategy for node, strategy in problem.fixed.items()}
        tables = [identity(len(node.costs)) for node in problem.nodes]
        way_back = Substitution(self.owners, tables, len(nodes))
        merged = replace(
            problem,
            nodes=tuple(nodes),
            edges=tuple(self.edges),
            groups=groups,
            ties=(),
            fixed=fixed,
            networks=way_back.of_networks(problem.networks),
        )
        return Reduced(merged, way_back)

    def _edge(self, edge: Edge, group: list[int] | None) -> None:
        u, v = self.owners[edge.u], self.owners[edge.v]
        if u == v and group is None:
            self.costs[u].append(edge.costs[edge.rows, edge.cols])
            return
        if u == v:
            v = self._copy(u)
        if group is not None:
            group.append(len(self.edges))
        self.edges.append(Edge(u, v, edge.rows, edge.cols, edge.costs))

    def _copy(self, owner: int) -> int:
        if owner not in self.copies:
            self.copies[owner] = self.count + len(self.copies)
            size = len(self.problem.nodes[self.owners.index(owner)].costs)
            same = np.where(np.eye(size, dtype=bool), 0, INFEASIBLE)
            self.edges.append(Edge.dense(owner, self.copies[owner], same))
        return self.copies[owner]
