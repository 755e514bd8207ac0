"""Functional edges: where each strategy of u leaves v at most one finite partner, v is folded into u.

With f(p) the only finite partner of p on an edge (u, v) of no group, every feasible assignment has x_v = f(x_u). So u
takes over the cost of v and of the edge at f(p) and the loads of v through f, and all other edges of v become edges
of u with the maps rows[f(p)] or cols[f(p)]. Exact because it only substitutes what must hold. An edge that then joins
u to itself folds into u's costs as its diagonal; v is left alone where that edge belongs to a group. A strategy p
without any finite partner is forbidden. In the factored form the matrices stay as they are, so nothing grows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ..problem import INFEASIBLE, Edge, Group, IntArray, Load, Node, Problem, add_costs, identity
from .reduction import Outcome, Pool, Reduced, Substitution


def contract_functional(problem: Problem) -> Outcome:
    """The problem without the nodes whose strategy another node's strategy decides."""
    contraction = _Contraction(problem)
    waiting = deque(contraction.open_edges())
    while waiting:
        waiting.extend(contraction.contract(waiting.popleft()))
    return contraction.reduced() if contraction.folded else None


class _Contraction:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.pool = Pool()
        self.edges: list[Edge | None] = list(problem.edges)
        self.grouped = problem.grouped
        self.edges_of: list[set[int]] = [set() for _ in problem.nodes]
        for index, edge in enumerate(problem.edges):
            self.edges_of[edge.u].add(index)
            self.edges_of[edge.v].add(index)
        self.costs = [[node.costs] for node in problem.nodes]
        self.loads = [list(node.loads) for node in problem.nodes]
        # Node v was folded into folded[v][0], with folded[v][1] = f.
        self.folded: dict[int, tuple[int, IntArray]] = {}
        self.composed: dict[tuple[int, int], IntArray] = {}
        self.partners: dict[tuple[int, int, int], IntArray | None] = {}

    def open_edges(self) -> list[int]:
        """The edges that can be functional: of no group, with absent pairs or one strategy at an end."""
        has_absent: dict[int, bool] = {}
        for edge in self.problem.edges:
            if id(edge.costs) not in has_absent:
                has_absent[id(edge.costs)] = bool(edge.costs.max() >= INFEASIBLE)
        return [
            index
            for index, edge in enumerate(self.problem.edges)
            if index not in self.grouped and has_absent[id(edge.costs)]
        ]

    def contract(self, index: int) -> list[int]:
        """Folds one end of the edge into the other where possible; the edges to look at again."""
        edge = self.edges[index]
        if edge is None:
            return []
        forward = self._partner(edge.rows, edge.cols, edge.costs)
        backward = self._partner(edge.cols, edge.rows, self.pool.transposed(edge.costs))
        if forward is not None and backward is not None and len(self.edges_of[edge.u]) < len(self.edges_of[edge.v]):
            forward = None  # either end can go: move the edges of the one that has fewer
        if forward is not None and self._may_fold(edge.v, edge.u):
            return self._fold(index, edge.v, edge.u, forward, edge.costs[edge.rows, edge.cols[forward]])
        if backward is not None and self._may_fold(edge.u, edge.v):
            return self._fold(index, edge.u, edge.v, backward, edge.costs[edge.rows[backward], edge.cols])
        return []

    def _partner(self, rows: IntArray, cols: IntArray, costs: IntArray) -> IntArray | None:
        """f as one index per strategy, 0 where there is no finite partner; None if some strategy has two."""
        key = (id(self.pool(rows)), id(self.pool(cols)), id(self.pool(costs)))
        if key not in self.partners:
            finite = (costs < INFEASIBLE)[:, cols]
            self.partners[key] = self.pool(finite.argmax(axis=1)[rows]) if finite.sum(axis=1)[rows].max() <= 1 else None
        return self.partners[key]

    def _may_fold(self, gone: int, kept: int) -> bool:
        """No edge of a group may come to join a node to itself."""
        shared = (index for index in self.edges_of[gone] & self.edges_of[kept] if index in self.grouped)
        return next(shared, None) is None

    def _fold(self, index: int, gone: int, kept: int, f: IntArray, price: IntArray) -> list[int]:
        self.folded[gone] = (kept, f)
        self.costs[kept] += [price, *(costs[f] for costs in self.costs[gone])]
        self.loads[kept] += [Load(interval, self._compose(usages, f)) for interval, usages in self.loads[gone]]
        self.edges[index] = None
        self.edges_of[kept].discard(index)
        self.edges_of[gone].discard(index)
        moved = [other for other in sorted(self.edges_of[gone]) if self._move(other, gone, kept, f)]
        return [other for other in moved if other not in self.grouped]

    def _move(self, index: int, gone: int, kept: int, f: IntArray) -> bool:
        """Hands the edge from `gone` to `kept`; False if it became part of the costs of `kept`."""
        edge = self.edges[index]
        assert edge is not None
        u, rows = (kept, self._compose(edge.rows, f)) if edge.u == gone else (edge.u, edge.rows)
        v, cols = (kept, self._compose(edge.cols, f)) if edge.v == gone else (edge.v, edge.cols)
        if u == v:
            self.costs[kept].append(edge.costs[rows, cols])
            self.edges[index] = None
            self.edges_of[kept].discard(index)
            return False
        self.edges[index] = Edge(u, v, rows, cols, edge.costs)
        self.edges_of[kept].add(index)
        return True

    def _compose(self, array: IntArray, f: IntArray) -> IntArray:
        key = (id(self.pool(array)), id(f))
        if key not in self.composed:
            self.composed[key] = self.pool(array[f])
        return self.composed[key]

    def reduced(self) -> Reduced:
        problem = self.problem
        kept = [index for index in range(len(problem.nodes)) if index not in self.folded]
        number = {index: position for position, index in enumerate(kept)}
        nodes = tuple(
            Node(problem.nodes[index].name, add_costs(self.costs[index]), further_loads=tuple(self.loads[index]))
            for index in kept
        )
        left = [index for index, edge in enumerate(self.edges) if edge is not None]
        edges = tuple(
            Edge(number[edge.u], number[edge.v], edge.rows, edge.cols, edge.costs)
            for edge in self.edges
            if edge is not None
        )
        place = {index: position for position, index in enumerate(left)}
        groups = tuple(Group(tuple(place[index] for index in group.edges)) for group in problem.groups)
        owners, tables = zip(*(self._owner(index) for index in range(len(problem.nodes))), strict=True)
        way_back = Substitution([number[owner] for owner in owners], tables, len(nodes))
        networks = way_back.of_networks(problem.networks)
        return Reduced(replace(problem, nodes=nodes, edges=edges, groups=groups, networks=networks), way_back)

    def _owner(self, node: int) -> tuple[int, IntArray]:
        """The node that decides this one, and by which map."""
        table = identity(len(self.problem.nodes[node].costs))
        while node in self.folded:
            node, f = self.folded[node]
            table = table[f]
        return node, table
