"""Few distinct rows and columns: an edge matrix keeps one row and one column of each kind.

Rows (columns) that no strategy uses are dropped and equal ones are merged, so that a program needs variables for pairs
of classes only. Exact because the price of every pair of strategies stays what it is. In a group two equal columns are
two different things to pay for, so only unused columns are dropped there, the same ones from every edge of the group.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..problem import Edge, IntArray, Problem, identity
from .reduction import Outcome, Pool, Reduced, Substitution


def compact_edges(problem: Problem) -> Outcome:
    """The problem with the smallest equivalent edge matrices."""
    compact = _Compact()
    edges = list(problem.edges)
    for index, edge in enumerate(problem.edges):
        if index not in problem.grouped:
            edges[index] = compact.edge(edge)
    for group in problem.groups:
        members = compact.group([problem.edges[index] for index in group.edges])
        for index, edge in zip(group.edges, members, strict=True):
            edges[index] = edge
    if all(new is old for new, old in zip(edges, problem.edges, strict=True)):
        return None
    tables = [identity(len(node.costs)) for node in problem.nodes]
    way_back = Substitution(range(len(tables)), tables, len(tables))
    return Reduced(replace(problem, edges=tuple(edges)), way_back)


class _Compact:
    """Compacts each combination of shared arrays once."""

    def __init__(self) -> None:
        self.pool = Pool()
        self.cache: dict[tuple[int, int, int], tuple[IntArray, IntArray, IntArray]] = {}

    def edge(self, edge: Edge) -> Edge:
        rows, cols, costs = self.pool(edge.rows), self.pool(edge.cols), self.pool(edge.costs)
        key = (id(rows), id(cols), id(costs))
        if key not in self.cache:
            self.cache[key] = self._compacted(rows, cols, costs)
        rows, cols, smaller = self.cache[key]
        return edge if smaller.shape == edge.costs.shape else Edge(edge.u, edge.v, rows, cols, smaller)

    def _compacted(self, rows: IntArray, cols: IntArray, costs: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        rows, costs = _merge_rows(rows, _used(rows, costs.shape[0]), costs)
        cols, transposed = _merge_rows(cols, _used(cols, costs.shape[1]), costs.T)
        return self.pool(rows), self.pool(cols), self.pool(np.ascontiguousarray(transposed.T))

    def group(self, edges: list[Edge]) -> list[Edge]:
        first = edges[0]
        rows, costs = _merge_rows(first.rows, _used(first.rows, first.costs.shape[0]), first.costs)
        used = np.unique(np.concatenate([edge.cols for edge in edges]))
        costs = costs[:, used]
        if costs.shape == first.costs.shape:
            return edges
        rows, costs = self.pool(rows), self.pool(np.ascontiguousarray(costs))
        return [
            Edge(edge.u, edge.v, rows, self.pool(np.searchsorted(used, edge.cols).astype(np.int64)), costs)
            for edge in edges
        ]


def _used(indices: IntArray, size: int) -> IntArray:
    return np.flatnonzero(np.bincount(indices, minlength=size))


def _merge_rows(indices: IntArray, used: IntArray, costs: IntArray) -> tuple[IntArray, IntArray]:
    """Indices and matrix with one row of each kind among the used ones, kinds in the order of first use by position."""
    kinds: dict[bytes, int] = {}
    new_of = np.zeros(costs.shape[0], np.int64)
    for row in used.tolist():
        new_of[row] = kinds.setdefault(costs[row].tobytes(), len(kinds))
    if len(kinds) == costs.shape[0]:
        return indices, costs
    representatives = np.zeros(len(kinds), np.int64)
    representatives[new_of[used[::-1]]] = used[::-1]
    return new_of[indices], costs[representatives]
