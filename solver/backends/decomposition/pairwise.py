"""The problem as a pairwise energy in flat floating-point arrays, batched so that numpy works on many edges at once.

Nodes are coloured so that no edge joins two of a colour, and numbered color by color. Strategy s of node i lives at the
flat position first[i] + s. Edges whose ends have the same colours and whose matrices have the same shape form a batch:
one array (R, C, B) of matrices, B contiguous, and per side the positions of the strategies of each row (or column).

A group becomes k edges of a k-th of its matrix each. That is a lower bound of the group: of a column that n of the k
consumers choose it pays n k-ths, the group all of it. It is exact where all consumers choose one column. So bounds on
the energy are bounds on the problem.
Absent pairs cost ABSENT_FACTOR times the largest finite cost, which again only lowers bounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...problem import INFEASIBLE, Edge, IntArray, Problem

FloatArray = npt.NDArray[np.float64]

ABSENT_FACTOR = 1e3

BATCH_ENTRIES = 1 << 19
"""Entries of the matrices of a batch: 4 MB, so that what numpy makes of them stays in the cache."""

Kind = tuple[int, int, int, int]
"""(lower colour, higher colour, rows, columns)."""

Member = tuple[Edge, bool, float]
"""(edge, whether its u has the higher colour, its share of its group)."""


@dataclass(frozen=True, eq=False)
class Side:
    """One side of a batch: the classes of the strategies of B nodes.

    Attributes:
        nodes: (B,) the nodes.
        positions: flat positions of their strategies, sorted by class and then by edge of the batch.
        starts: (K * B,) where the strategies of (class k, edge b) start in `positions`, at k * B + b.
        counts: (K * B,) how many there are; all 1 where every strategy is a class of its own.
        classes: K.
        class_of, class_starts: the class of strategy s of edge b is class_of[class_starts[b] + s].
    """

    nodes: IntArray
    positions: IntArray
    starts: IntArray
    counts: IntArray
    classes: int
    class_of: IntArray
    class_starts: IntArray

    def chosen_class(self, chosen: IntArray) -> IntArray:
        """(B,): the class of the strategy that each node chose."""
        classes: IntArray = self.class_of[self.class_starts + chosen[self.nodes]]
        return classes

    def least(self, values: FloatArray) -> FloatArray:
        """(K, B): the least of the values over the strategies of each class."""
        gathered = values[self.positions]
        if len(gathered) > len(self.starts):
            gathered = np.minimum.reduceat(gathered, self.starts)
        return gathered.reshape(self.classes, -1)

    def add(self, values: FloatArray, change: FloatArray) -> None:
        """Adds change (K, B) to the values of the strategies of each class."""
        flat = change.ravel()
        if len(self.positions) > len(self.starts):
            flat = np.repeat(flat, self.counts)
        np.add.at(values, self.positions, flat)


@dataclass(frozen=True, eq=False)
class Batch:
    """B edges between two colours with matrices of one shape; costs (R, C, B)."""

    colors: tuple[int, int]
    u: Side
    v: Side
    costs: FloatArray


@dataclass(frozen=True, eq=False)
class Pairwise:
    """The energy: sum of costs at the chosen positions plus the chosen entries of all batches.

    Attributes:
        order: (N,) node of the problem per number here.
        first: (N + 1,) first flat position of each node.
        color_starts: first node of each colour, and N.
        costs: (first[-1],) node costs without prices on memory.
        batches: the edges.
        most: no assignment without absent pairs costs more.
    """

    order: IntArray
    first: IntArray
    color_starts: IntArray
    costs: FloatArray
    batches: tuple[Batch, ...]
    most: float


def build_pairwise(problem: Problem) -> Pairwise:
    """The pairwise energy of the problem."""
    colors = _colors(problem)
    order = np.argsort(colors, kind="stable").astype(np.int64)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    sizes = np.array([len(problem.nodes[node].costs) for node in order], np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    color_starts = np.searchsorted(colors[order], np.arange(int(colors.max(initial=-1)) + 2)).astype(np.int64)
    absent = ABSENT_FACTOR * _largest(problem)
    costs = np.concatenate([_finite(problem.nodes[node].costs, absent) for node in order])
    batches = _batches(_shares(problem), colors, number, first, absent)
    return Pairwise(order, first, color_starts, costs, batches, _most(problem))


def _colors(problem: Problem) -> IntArray:
    """Greedy, nodes of high degree first: a graph of tensors needs few colours."""
    neighbours: list[set[int]] = [set() for _ in problem.nodes]
    for edge in problem.edges:
        neighbours[edge.u].add(edge.v)
        neighbours[edge.v].add(edge.u)
    colors = np.full(len(problem.nodes), -1, np.int64)
    for node in sorted(range(len(neighbours)), key=lambda node: -len(neighbours[node])):
        taken = {int(colors[other]) for other in neighbours[node]}
        colors[node] = next(color for color in range(len(taken) + 1) if color not in taken)
    return colors


def _largest(problem: Problem) -> float:
    return float(max([1, *(int(np.abs(costs[costs < INFEASIBLE]).max(initial=0)) for costs in _arrays(problem))]))


def _most(problem: Problem) -> float:
    return float(sum(max(0, int(costs[costs < INFEASIBLE].max(initial=0))) for costs in _arrays(problem)))


def _arrays(problem: Problem) -> Iterator[IntArray]:
    yield from (node.costs for node in problem.nodes)
    yield from (edge.costs for edge in problem.edges)


def _finite(costs: IntArray, absent: float) -> FloatArray:
    return np.where(costs >= INFEASIBLE, absent, costs).astype(np.float64)


def _shares(problem: Problem) -> list[tuple[Edge, float]]:
    """The edges and their share of their group, 1 outside groups; an edge of a group with its own columns only."""
    shares = [(edge, 1.0) for edge in problem.edges]
    for group in problem.groups:
        for index in group.edges:
            edge = problem.edges[index]
            used, cols = np.unique(edge.cols, return_inverse=True)
            own = Edge(edge.u, edge.v, edge.rows, cols, edge.costs[:, used])
            shares[index] = own, 1.0 / len(group.edges)
    return shares


def _batches(
    shares: list[tuple[Edge, float]], colors: IntArray, number: IntArray, first: IntArray, absent: float
) -> tuple[Batch, ...]:
    alike: dict[Kind, list[Member]] = defaultdict(list)
    for edge, part in shares:
        low, high = int(colors[edge.u]), int(colors[edge.v])
        rows, cols = edge.costs.shape
        if low < high:
            alike[low, high, rows, cols].append((edge, False, part))
        else:
            alike[high, low, cols, rows].append((edge, True, part))
    batches = []
    for low, high, rows, cols, edges in _split(alike):
        costs = np.empty((rows, cols, len(edges)))
        for b, (edge, flipped, part) in enumerate(edges):
            matrix = _finite(edge.costs, absent) * part
            costs[:, :, b] = matrix.T if flipped else matrix
        u = [(edge.v, edge.cols) if flipped else (edge.u, edge.rows) for edge, flipped, _ in edges]
        v = [(edge.u, edge.rows) if flipped else (edge.v, edge.cols) for edge, flipped, _ in edges]
        batches.append(Batch((low, high), _side(u, rows, number, first), _side(v, cols, number, first), costs))
    return tuple(batches)


def _split(alike: dict[Kind, list[Member]]) -> Iterator[tuple[int, int, int, int, list[Member]]]:
    """The edges kind by kind, in parts that fit the cache."""
    for kind in sorted(alike):
        edges = alike[kind]
        most = max(1, BATCH_ENTRIES // (kind[2] * kind[3]))
        for start in range(0, len(edges), most):
            yield *kind, edges[start : start + most]


def _side(ends: list[tuple[int, IntArray]], classes: int, number: IntArray, first: IntArray) -> Side:
    nodes = number[[node for node, _ in ends]]
    count = len(ends)
    keys = np.concatenate([indices * count + b for b, (_, indices) in enumerate(ends)])
    positions = np.concatenate([first[node] + np.arange(len(i)) for node, (_, i) in zip(nodes, ends, strict=True)])
    counts = np.bincount(keys, minlength=classes * count)
    assert counts.min() > 0, "a row or column without a strategy: compact the edges first"
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)
    class_of = np.concatenate([indices for _, indices in ends])
    class_starts = np.concatenate([[0], np.cumsum([len(indices) for _, indices in ends])[:-1]]).astype(np.int64)
    positions = positions[np.argsort(keys, kind="stable")]
    return Side(nodes, positions, starts, counts, classes, class_of, class_starts)
