"""The program with pairs of layouts in the place of networks, which the search within a memory budget still needs.

An edge for every tensor argument: rows are the layouts the producer can give the tensor, columns those its consumers in
one phase want of it. Consumers of one tensor form a group: each distinct layout is paid once. What networks know and
pairs do not is that ways to different layouts may share steps; so a pair's price is never less.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from solver import INFEASIBLE, Edge, Group, Problem

from ..capture import TensorMeta
from ..layout import Layout
from ..redistribution import Banned
from ..strategies import Strategy
from .formulation import Formulation
from .tensor_networks import Demand, layout_of


def demand_edges(formulation: Formulation) -> Iterator[tuple[Demand, int, int, int]]:
    """Every demand with each of its consumers: the solver node, its position, and the number of the edge between.

    The edges of demands come first in the problem of pairs, in this order.
    """
    consumers = ((demand, *consumer) for demand in formulation.demands for consumer in demand.consumers)
    return ((demand, node, position, k) for k, (demand, node, position) in enumerate(consumers))


def pair_problem(formulation: Formulation) -> Problem:
    """The problem without memory, its networks as edges and groups; edges of tensors that are to be alike follow."""
    terms = _Terms(formulation)
    edges: list[Edge] = []
    sharing: dict[object, list[Demand]] = defaultdict(list)
    members: dict[object, list[int]] = defaultdict(list)
    keys = [d.ref if formulation.keep_copies and not d.remade else d for d in formulation.demands]
    for key, demand in zip(keys, formulation.demands):
        sharing[key].append(demand)
    for key, demand in zip(keys, formulation.demands):
        added = terms.edges(demand, sharing[key])
        members[key].extend(range(len(edges), len(edges) + len(added)))
        edges.extend(added)
    groups = tuple(Group(tuple(found)) for found in members.values() if len(found) > 1)
    return replace(formulation.free, edges=(*edges, *formulation.free.edges), groups=groups, networks=())


def distinct_layouts(
    strategies: Sequence[Strategy], position: int | None, output: int
) -> tuple[tuple[Layout, ...], np.ndarray]:
    """The distinct layouts of a result (position None) or of what a consumer wants, and each strategy's index."""
    index: dict[Layout, int] = {}
    layouts = (layout_of(strategy, position, output) for strategy in strategies)
    indices = [index.setdefault(layout, len(index)) for layout in layouts]
    return tuple(index), np.array(indices, dtype=np.int64)


class _Terms:
    """Costs of edges as integer arrays, each made once and shared."""

    def __init__(self, formulation: Formulation) -> None:
        self._graph, self._prices, self._strategies = formulation.graph, formulation.prices, formulation.strategies
        self._cache: dict[object, np.ndarray] = {}
        self._columns: dict[object, tuple[tuple[Layout, ...], np.ndarray]] = {}

    def edges(self, demand: Demand, sharing: Sequence[Demand]) -> list[Edge]:
        """One edge per consumer, on one matrix with a column for every layout that some consumer may want among the
        demands that share what is made.
        """
        before, rows = self._choices(demand.ref.node, None, demand.ref.output)
        after: dict[Layout, None] = {}
        for node, position in (consumer for each in sharing for consumer in each.consumers):
            after.update(dict.fromkeys(self._choices(node, position, 0)[0]))
        columns = tuple(after)
        costs = self._matrix(self._graph.meta(demand.ref), before, columns, demand.banned)
        return [
            Edge(demand.ref.node, node, rows, self._column_indices(node, position, columns), costs)
            for node, position in demand.consumers
        ]

    def _choices(self, node: int, position: int | None, output: int) -> tuple[tuple[Layout, ...], np.ndarray]:
        key = (id(self._strategies[node]), position, output)
        if key not in self._columns:
            self._columns[key] = distinct_layouts(self._strategies[node], position, output)
        return self._columns[key]

    def _column_indices(self, node: int, position: int, columns: tuple[Layout, ...]) -> np.ndarray:
        key = (id(self._strategies[node]), position, columns)
        if key not in self._cache:
            layouts, indices = self._choices(node, position, 0)
            place = {layout: k for k, layout in enumerate(columns)}
            self._cache[key] = np.array([place[layout] for layout in layouts], dtype=np.int64)[indices]
        return self._cache[key]

    def _matrix(
        self, meta: TensorMeta, before: tuple[Layout, ...], after: tuple[Layout, ...], banned: Banned
    ) -> np.ndarray:
        key = (meta, before, after, banned)
        if key not in self._cache:
            self._cache[key] = _nanoseconds(self._prices.matrix_s(meta, before, after, banned))
        return self._cache[key]


def _nanoseconds(seconds: np.ndarray) -> np.ndarray:
    finite = np.isfinite(seconds)
    return np.where(finite, np.rint(np.where(finite, seconds, 0.0) * 1e9), INFEASIBLE).astype(np.int64)
