"""Nodes of degree one and two without loads and networks are minimised away (leaf and series elimination).

Let v use no memory, have part in no network, and let its only edges, of no group, lead to u (leaf) or to u and w
(series). Once u (and w) have chosen, v takes its best strategy:

    leaf     costs_u[p]  +=  min_q  e1[p, q] + costs_v[q]
    series   e[p, r]      =  min_q  e1[p, q] + costs_v[q] + e2[q, r]        a new edge (u, w)

Exact because nothing else sees v's choice; the way back takes the minimising q. Both are done per class of strategies
(row or column of the edge). A series step is taken only where the new matrix is no larger than the two it
replaces, and within MOST_WORK.
Source: nonserial dynamic programming, Bertele and Brioschi, 1972.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from ..networks import Assignment
from ..problem import INFEASIBLE, Edge, Group, IntArray, Node, Problem, add_costs
from .reduction import Outcome, Reduced, renumbered

MOST_WORK = 10**9
"""Sums formed by the series steps of one call: some ten seconds. Nodes that would need more stay."""


def eliminate_chains(problem: Problem) -> Outcome:
    """The problem without nodes of degree one and two that use no memory."""
    elimination = _Elimination(problem)
    waiting = deque(range(len(problem.nodes)))
    while waiting:
        waiting.extend(elimination.eliminate(waiting.popleft()))
    return elimination.reduced() if elimination.gone else None


@dataclass(frozen=True, eq=False)
class _Gone:
    """Node v takes best[class of u's choice] or best[class of u's choice, class of w's choice]."""

    v: int
    neighbours: tuple[int, ...]
    classes: tuple[IntArray, ...]
    best: IntArray


@dataclass(frozen=True, eq=False)
class _WayBack:
    kept: tuple[int, ...]
    gone: tuple[_Gone, ...]

    def lift(self, assignment: Assignment) -> Assignment:
        """Decides the eliminated nodes in reverse order of their elimination."""
        chosen = dict(zip(self.kept, assignment.choices, strict=True))
        for gone in reversed(self.gone):
            classes = (of[chosen[node]] for node, of in zip(gone.neighbours, gone.classes, strict=True))
            chosen[gone.v] = int(gone.best[tuple(classes)])
        return assignment._replace(choices=tuple(chosen[node] for node in range(len(chosen))))

    def lower(self, assignment: Assignment) -> Assignment:
        """The choices of the nodes that are left."""
        return assignment._replace(choices=tuple(assignment.choices[node] for node in self.kept))


class _Elimination:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.edges: list[Edge | None] = list(problem.edges)
        self.grouped = problem.grouped
        self.costs = [node.costs for node in problem.nodes]
        self.edges_of: list[set[int]] = [set() for _ in problem.nodes]
        for index, edge in enumerate(problem.edges):
            self.edges_of[edge.u].add(index)
            self.edges_of[edge.v].add(index)
        self.in_networks = {node for network in problem.networks for node, _ in network.ends}
        self.gone: dict[int, _Gone] = {}
        self.work = 0

    def eliminate(self, v: int) -> list[int]:
        """Minimises v away where possible; the nodes to look at again."""
        indices = sorted(self.edges_of[v])
        if v in self.gone or self.problem.nodes[v].loads or not 1 <= len(indices) <= 2:
            return []
        if v in self.in_networks or any(index in self.grouped for index in indices):
            return []
        sides = [self._away_from(v, index) for index in indices]
        neighbours = tuple(u for u, _, _ in sides)
        if len(set(neighbours)) < len(sides):
            return []
        if len(sides) == 1:
            self._leaf(v, *sides[0])
        elif not self._series(v, sides, sum(self._size(index) for index in indices)):
            return []
        for index in indices:
            edge = self.edges[index]
            assert edge is not None
            self.edges[index] = None
            self.edges_of[edge.u].discard(index)
            self.edges_of[edge.v].discard(index)
        return list(neighbours)

    def _size(self, index: int) -> int:
        edge = self.edges[index]
        assert edge is not None
        return edge.costs.size

    def _away_from(self, v: int, index: int) -> tuple[int, IntArray, IntArray]:
        """(neighbour, classes of its strategies, costs[class, strategy of v])."""
        edge = self.edges[index]
        assert edge is not None
        if edge.v == v:
            return edge.u, edge.rows, edge.costs[:, edge.cols]
        return edge.v, edge.cols, edge.costs[edge.rows].T

    def _leaf(self, v: int, u: int, classes: IntArray, costs: IntArray) -> None:
        total = _plus(costs, self.costs[v][None, :])
        best = total.argmin(axis=1)
        self.gone[v] = _Gone(v, (u,), (classes,), best)
        self.costs[u] = add_costs([self.costs[u], total.min(axis=1)[classes]])

    def _series(self, v: int, sides: list[tuple[int, IntArray, IntArray]], size: int) -> bool:
        (u, rows, left), (w, cols, right) = sides
        work = left.shape[0] * left.shape[1] * right.shape[0]
        if len(left) * len(right) > size or self.work + work > MOST_WORK:
            return False
        self.work += work
        left = _plus(left, self.costs[v][None, :])
        best = np.empty((len(left), len(right)), np.int64)
        costs = np.empty((len(left), len(right)), np.int64)
        for row in range(len(left)):
            total = _plus(left[row][None, :], right)
            best[row] = total.argmin(axis=1)
            costs[row] = total.min(axis=1)
        self.gone[v] = _Gone(v, (u, w), (rows, cols), best)
        self.edges_of[u].add(len(self.edges))
        self.edges_of[w].add(len(self.edges))
        self.edges.append(Edge(u, w, rows, cols, costs))
        return True

    def reduced(self) -> Reduced:
        problem = self.problem
        kept = tuple(index for index in range(len(problem.nodes)) if index not in self.gone)
        number = {index: position for position, index in enumerate(kept)}
        nodes = tuple(
            node if node.costs is self.costs[index] else Node(node.name, self.costs[index], further_loads=node.loads)
            for index, node in ((index, problem.nodes[index]) for index in kept)
        )
        place: dict[int, int] = {}
        edges: list[Edge] = []
        for index, edge in enumerate(self.edges):
            if edge is not None:
                place[index] = len(edges)
                edges.append(Edge(number[edge.u], number[edge.v], edge.rows, edge.cols, edge.costs))
        groups = tuple(Group(tuple(place[index] for index in group.edges)) for group in problem.groups)
        networks = renumbered(problem.networks, number)
        smaller = replace(problem, nodes=nodes, edges=tuple(edges), groups=groups, networks=networks)
        return Reduced(smaller, _WayBack(kept, tuple(self.gone.values())))


def _plus(a: IntArray, b: IntArray) -> IntArray:
    """a + b in which INFEASIBLE absorbs."""
    return np.where((a >= INFEASIBLE) | (b >= INFEASIBLE), INFEASIBLE, a + b)
