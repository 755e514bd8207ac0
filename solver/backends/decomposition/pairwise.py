"""The problem as a pairwise energy in flat floating-point arrays, batched so that numpy works on many edges at once.

Nodes are coloured so that no edge joins two of a colour, and numbered color by color. Strategy s of node i lives at the
flat position first[i] + s. Edges whose ends have the same colours and whose matrices have the same shape form a batch:
one array (R, C, B) of matrices, B contiguous, and per side the positions of the strategies of each row (or column).

A group becomes k edges of a k-th of its matrix each. That is a lower bound of the group: of a column that n of the k
consumers choose it pays n k-ths, the group all of it. It is exact where all consumers choose one column. So bounds on
the energy are bounds on the problem.
A network becomes an edge from the producer to each of the k consumers that pay arcs together, priced at a k-th of the
shortest ways: what they pay together is no less than the longest of these, and that no less than their mean.
Absent pairs cost ABSENT_FACTOR times the largest finite cost, which again only lowers bounds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...problem import INFEASIBLE, IntArray, Problem
from ...routing import distances

FloatArray = npt.NDArray[np.float64]

ABSENT_FACTOR = 1e3

BATCH_ENTRIES = 1 << 19
"""Entries of the matrices of a batch: 4 MB, so that what numpy makes of them stays in the cache."""

Kind = tuple[int, int, int, int]
"""(lower colour, higher colour, rows, columns)."""


class Pair(NamedTuple):
    """A part of the matrix of an edge, or of the shortest ways of a network; u and v may be the same node."""

    u: int
    v: int
    rows: IntArray
    cols: IntArray
    costs: IntArray
    part: float


Member = tuple[Pair, bool]
"""(pair, whether its u has the higher colour)."""


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
        batches: the pairs of different nodes.
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
    pairs = [*_pairs_of_edges(problem), *_pairs_of_networks(problem)]
    apart = [pair for pair in pairs if pair.u != pair.v]
    colors = _colors(len(problem.nodes), apart)
    order = np.argsort(colors, kind="stable").astype(np.int64)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    sizes = np.array([len(problem.nodes[node].costs) for node in order], np.int64)
    first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    color_starts = np.searchsorted(colors[order], np.arange(int(colors.max(initial=-1)) + 2)).astype(np.int64)
    arrays = [node.costs for node in problem.nodes] + [pair.costs for pair in pairs]
    absent = ABSENT_FACTOR * _largest(arrays)
    costs = np.concatenate([_finite(problem.nodes[node].costs, absent) for node in order])
    for pair in pairs:
        if pair.u == pair.v:
            own = first[number[pair.u]] + np.arange(len(pair.rows))
            costs[own] += _finite(pair.costs[pair.rows, pair.cols], absent) * pair.part
    batches = _batches(apart, colors, number, first, absent)
    return Pairwise(order, first, color_starts, costs, batches, _most(arrays))


def _colors(nodes: int, pairs: Sequence[Pair]) -> IntArray:
    """Greedy, nodes of high degree first: a graph of tensors needs few colours."""
    neighbours: list[set[int]] = [set() for _ in range(nodes)]
    for pair in pairs:
        neighbours[pair.u].add(pair.v)
        neighbours[pair.v].add(pair.u)
    colors = np.full(nodes, -1, np.int64)
    for node in sorted(range(len(neighbours)), key=lambda node: -len(neighbours[node])):
        taken = {int(colors[other]) for other in neighbours[node]}
        colors[node] = next(color for color in range(len(taken) + 1) if color not in taken)
    return colors


def _largest(arrays: Sequence[IntArray]) -> float:
    return float(max([1, *(int(np.abs(costs[costs < INFEASIBLE]).max(initial=0)) for costs in arrays)]))


def _most(arrays: Sequence[IntArray]) -> float:
    return float(sum(max(0, int(costs[costs < INFEASIBLE].max(initial=0))) for costs in arrays))


def _finite(costs: IntArray, absent: float) -> FloatArray:
    return np.where(costs >= INFEASIBLE, absent, costs).astype(np.float64)


def _pairs_of_edges(problem: Problem) -> list[Pair]:
    """The edges and their share of their group, 1 outside groups; an edge of a group with its own columns only."""
    pairs = [Pair(edge.u, edge.v, edge.rows, edge.cols, edge.costs, 1.0) for edge in problem.edges]
    for group in problem.groups:
        for index in group.edges:
            edge = problem.edges[index]
            used, cols = np.unique(edge.cols, return_inverse=True)
            pairs[index] = Pair(edge.u, edge.v, edge.rows, cols, edge.costs[:, used], 1.0 / len(group.edges))
    return pairs


def _pairs_of_networks(problem: Problem) -> Iterator[Pair]:
    """Producer and consumer, at the shortest ways between the vertices that their strategies use; of what the backward
    may do without, or make again, nothing: no price is negative.
    """
    known: dict[tuple[int, ...], IntArray] = {}
    for network in problem.networks:
        together = (network.consumers,) if network.kept else (network.forward, network.backward)
        if network.is_optional:
            together = (network.forward,)
        makes, rows = np.unique(network.makes, return_inverse=True)
        arrays = network.tails, network.heads, network.costs, network.makes
        key = network.vertices, *(id(array) for array in arrays)
        if key not in known:
            known[key] = distances(network, makes)
        for consumers in together:
            for node, wants in consumers:
                wanted, cols = np.unique(wants, return_inverse=True)
                ways = known[key][:, wanted]
                yield Pair(network.producer, node, rows, cols, ways, 1.0 / len(consumers))


def _batches(
    pairs: list[Pair], colors: IntArray, number: IntArray, first: IntArray, absent: float
) -> tuple[Batch, ...]:
    alike: dict[Kind, list[Member]] = defaultdict(list)
    for pair in pairs:
        low, high = int(colors[pair.u]), int(colors[pair.v])
        rows, cols = pair.costs.shape
        if low < high:
            alike[low, high, rows, cols].append((pair, False))
        else:
            alike[high, low, cols, rows].append((pair, True))
    batches = []
    for low, high, rows, cols, members in _split(alike):
        costs = np.empty((rows, cols, len(members)))
        for b, (pair, flipped) in enumerate(members):
            matrix = _finite(pair.costs, absent) * pair.part
            costs[:, :, b] = matrix.T if flipped else matrix
        u = [(pair.v, pair.cols) if flipped else (pair.u, pair.rows) for pair, flipped in members]
        v = [(pair.u, pair.rows) if flipped else (pair.v, pair.cols) for pair, flipped in members]
        batches.append(Batch((low, high), _side(u, rows, number, first), _side(v, cols, number, first), costs))
    return tuple(batches)


def _split(alike: dict[Kind, list[Member]]) -> Iterator[tuple[int, int, int, int, list[Member]]]:
    """The pairs kind by kind, in parts that fit the cache."""
    for kind in sorted(alike):
        members = alike[kind]
        most = max(1, BATCH_ENTRIES // (kind[2] * kind[3]))
        for start in range(0, len(members), most):
            yield *kind, members[start : start + most]


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
