"""Nodes that are alike choose alike, so one of them decides for all.

Nodes are duplicates if they have equal costs, no loads, and the same surroundings: plain edges to the same nodes
through the same maps and matrices, a place among the consumers of the same groups with the same columns, and groups of
their own with the same consumers, maps and matrices. No edge joins two of them, since then each would have a neighbour
that the other has not. The k duplicates become one node: its costs, its plain edges and its own groups count k times,
and in a group that it consumes from it stands once.

Exact: let the duplicates choose s_1 .. s_k while all else stays. They pay a(s_1) + .. + a(s_k) + S(s_1 .. s_k), where S
are the groups that they consume from: a set of columns is paid once, so a smaller set costs no more. If all took s_j
instead they would pay k a(s_j) + S(s_j). The mean of that over j is at most what they pay now, so for some j it is no
dearer. Loads are excluded because memory may have room for one of two, and not for both.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from ..problem import INFEASIBLE, Edge, Group, IntArray, Node, Problem, identity
from .reduction import Outcome, Pool, Reduced, Substitution


def merge_duplicates(problem: Problem) -> Outcome:
    """The problem with one node for each class of duplicates."""
    candidates = {index for alike in _alike(_outlines(problem)) for index in alike}
    first_of = list(range(len(problem.nodes)))
    for alike in _alike(_Surroundings(problem, candidates).signatures()) if candidates else ():
        for index in alike:
            first_of[index] = alike[0]
    return None if first_of == list(range(len(first_of))) else _merged(problem, first_of)


def _alike(signatures: Iterable[tuple[int, Hashable]]) -> list[list[int]]:
    """The nodes that share a signature with another one, class by class."""
    classes: dict[Hashable, list[int]] = {}
    for index, signature in signatures:
        classes.setdefault(signature, []).append(index)
    return [members for members in classes.values() if len(members) > 1]


def _outlines(problem: Problem) -> Iterator[tuple[int, Hashable]]:
    """(node, costs and neighbours) for nodes without loads and networks: quick to compare, duplicates agree in them."""
    in_networks = {node for network in problem.networks for node, _ in network.ends}
    neighbours: list[list[int]] = [[] for _ in problem.nodes]
    for edge in problem.edges:
        neighbours[edge.u].append(edge.v)
        neighbours[edge.v].append(edge.u)
    for index, node in enumerate(problem.nodes):
        if neighbours[index] and not node.loads and index not in in_networks:
            yield index, (node.costs.tobytes(), tuple(sorted(neighbours[index])))


class _Surroundings:
    """What surrounds each candidate: its edges and groups, compared by the identity of pooled arrays."""

    def __init__(self, problem: Problem, candidates: set[int]) -> None:
        self.problem = problem
        self.candidates = candidates
        self.pool = Pool()
        self.around: list[list[tuple[Hashable, ...]]] = [[] for _ in problem.nodes]
        for index, edge in enumerate(problem.edges):
            if index not in problem.grouped:
                self._plain(edge)
        for number, group in enumerate(problem.groups):
            self._group(number, [problem.edges[index] for index in group.edges])

    def signatures(self) -> list[tuple[int, Hashable]]:
        """(candidate, signature); duplicates have equal signatures."""
        costs = (id(self.pool(self.problem.nodes[index].costs)) for index in sorted(self.candidates))
        around = (tuple(sorted(self.around[index], key=repr)) for index in sorted(self.candidates))
        return list(zip(sorted(self.candidates), zip(costs, around, strict=True), strict=True))

    def _plain(self, edge: Edge) -> None:
        if not self.candidates & {edge.u, edge.v}:
            return
        rows, cols, costs = id(self.pool(edge.rows)), id(self.pool(edge.cols)), self.pool(edge.costs)
        self.around[edge.u].append(("edge", edge.v, rows, cols, id(costs)))
        self.around[edge.v].append(("edge", edge.u, cols, rows, id(self.pool.transposed(costs))))

    def _group(self, number: int, edges: list[Edge]) -> None:
        first = edges[0]
        consumers = sorted((edge.v, id(self.pool(edge.cols))) for edge in edges)
        own = ("producer", tuple(consumers), id(self.pool(first.rows)), id(self.pool(first.costs)))
        self.around[first.u].append(own)
        for consumer, cols in consumers:
            self.around[consumer].append(("consumer", number, cols))


def _merged(problem: Problem, first_of: list[int]) -> Reduced:
    kept = [index for index, first in enumerate(first_of) if index == first]
    number = {index: position for position, index in enumerate(kept)}
    times = np.bincount(first_of, minlength=len(first_of)).tolist()
    nodes = tuple(
        Node(node.name, _times(node.costs, times[index]), further_loads=node.loads)
        for index, node in ((index, problem.nodes[index]) for index in kept)
    )
    group_of = {edge: index for index, group in enumerate(problem.groups) for edge in group.edges}
    cache: dict[tuple[int, int], IntArray] = {}
    edges: list[Edge] = []
    members: dict[int, list[int]] = {}
    for index, edge in enumerate(problem.edges):
        if edge.u not in number or edge.v not in number:
            continue
        factor = times[edge.u] * (1 if index in group_of else times[edge.v])
        costs = cache.setdefault((id(edge.costs), factor), _times(edge.costs, factor))
        if index in group_of:
            members.setdefault(group_of[index], []).append(len(edges))
        edges.append(Edge(number[edge.u], number[edge.v], edge.rows, edge.cols, costs))
    groups = tuple(Group(tuple(indices)) for _, indices in sorted(members.items()))
    owners = [number[first] for first in first_of]
    tables = [identity(len(node.costs)) for node in problem.nodes]
    way_back = Substitution(owners, tables, len(nodes))
    networks = way_back.of_networks(problem.networks)
    return Reduced(replace(problem, nodes=nodes, edges=tuple(edges), groups=groups, networks=networks), way_back)


def _times(costs: IntArray, factor: int) -> IntArray:
    return costs if factor == 1 else np.where(costs >= INFEASIBLE, INFEASIBLE, costs * factor)
