"""The evidence in a plan file: which decisions agree with the redistributions and times that it records.

A file that was edited by hand still lists the redistributions and times of the plan before the edit. As a problem for
the solver they tell what that plan decided (:mod:`autoshard.review.edits`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from solver import INFEASIBLE, Edge, Node, Problem

from ..layout import Layout
from ..planning import Demand, Formulation, demand_edges, pair_problem
from ..plans import Redistribution, ShardingPlan


class FileEvidence:
    """The redistributions and times that a plan records, and the strategies of a formulation to compare them with."""

    def __init__(self, plan: ShardingPlan, formulation: Formulation) -> None:
        self._formulation, self._graph = formulation, formulation.graph
        self._ns = {entry.name: entry.predicted_ns for entry in plan.execution}
        self._moves: dict[tuple[str, str], list[Redistribution]] = defaultdict(list)
        for entry in plan.redistributions:
            self._moves[entry.tensor, entry.phase].append(entry)
        self._penalty = len(formulation.strategies) + 1
        self._times: dict[int, np.ndarray] = {}

    def problem(self, found: Sequence[int | None]) -> Problem:
        """The problem whose optimum is the plan before the edit: a strategy that disagrees with a recorded time or
        redistribution costs more than all decisions together, and one that is not the ``found`` one costs 1.
        """
        given = pair_problem(self._formulation)
        nodes = tuple(Node(node.name, self._node_costs(i, node.costs, found[i])) for i, node in enumerate(given.nodes))
        edges = list(self._edges(given))
        edges += [_unpriced(edge) for edge in given.edges[len(edges) :]]
        free = replace(given, groups=(), ties=(), usage_limit=None, usage_price=None, budgets=())
        return replace(free, nodes=nodes, edges=tuple(edges))

    def _node_costs(self, node: int, costs: np.ndarray, found: int | None) -> np.ndarray:
        differs = np.zeros(len(costs), dtype=np.int64)
        if found is not None:
            differs = (np.arange(len(costs)) != found).astype(np.int64)
        if node < len(self._graph.nodes) and self._graph.nodes[node].name in self._ns:
            differs = differs + self._penalty * (self._time_ns(node) != self._ns[self._graph.nodes[node].name])
        return np.where(costs >= INFEASIBLE, INFEASIBLE, differs).astype(np.int64)

    def _time_ns(self, node: int) -> np.ndarray:
        """The nanoseconds of an operator under each of its strategies, rounded as a plan file rounds them."""
        strategies = self._formulation.strategies[node]
        if id(strategies) not in self._times:
            seconds = self._formulation.prices.compute_s(self._graph.nodes[node], strategies)
            self._times[id(strategies)] = np.rint(seconds * 1e9).astype(np.int64)
        return self._times[id(strategies)]

    def _edges(self, given: Problem) -> Iterator[Edge]:
        """The edges of the demands, in their order; their costs count disagreements with the record."""
        strategies = self._formulation.strategies
        for demand, consumer, position, number in demand_edges(self._formulation):
            edge = given.edges[number]
            have = _by_class(edge.rows, [s.outputs[demand.ref.output] for s in strategies[edge.u]])
            readers = strategies[consumer]
            want = _by_class(edge.cols, [s.outputs[0] if position < 0 else s.inputs[position] for s in readers])
            times = sum(other == consumer for other, _ in demand.consumers)
            yield self._judged(edge, have, want, *self._moves_for(demand, consumer, times))

    def _moves_for(self, demand: Demand, consumer: int, times: int) -> tuple[set[tuple[Layout, Layout]], bool]:
        """The layouts (from, to) between which a tensor is recorded to move for a consumer, and whether the consumer
        may also take it as it lies.
        """
        name = self._formulation.consumer_name(consumer)
        moves = self._moves[self._graph.tensor_name(demand.ref), demand.phase]
        named = [move for move in moves if name in move.consumers]
        unnamed = [move for move in moves if not move.consumers]
        return {(move.path[0], move.path[-1]) for move in named + unnamed}, not named or times > 1

    def _judged(
        self,
        edge: Edge,
        have: list[Layout | None],
        want: list[Layout | None],
        moves: set[tuple[Layout, Layout]],
        stays: bool,
    ) -> Edge:
        costs = np.where(edge.costs >= INFEASIBLE, INFEASIBLE, 0)
        for i, a in enumerate(have):
            for j, b in enumerate(want):
                agrees = a is None or b is None or (a, b) in moves or (stays and a == b)
                if not agrees and costs[i, j] < INFEASIBLE:
                    costs[i, j] = self._penalty
        return Edge(edge.u, edge.v, edge.rows, edge.cols, costs)


def _unpriced(edge: Edge) -> Edge:
    return Edge(edge.u, edge.v, edge.rows, edge.cols, np.where(edge.costs >= INFEASIBLE, INFEASIBLE, 0))


def _by_class(classes: np.ndarray, layouts: Sequence[Layout | None]) -> list[Layout | None]:
    """The layout of every class of strategies, up to the last that some strategy has."""
    found: list[Layout | None] = [None] * (int(classes.max()) + 1)
    for number, layout in zip(classes, layouts):
        found[number] = layout
    return found
