"""Edges that price the same choices become one edge.

Edges between the same two nodes with the same rows and columns add up. A group of one edge is an ordinary edge. Edges
of a group with the same consumer and columns choose the same pair, which is paid once anyway. Groups of one producer
whose edges match one to one (same consumers, rows and columns) choose the same columns, so their matrices add up:
tied layers give such images. All exact, because the price of every assignment stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..problem import Edge, Group, Problem, add_costs, identity
from .reduction import Outcome, Pool, Reduced, Substitution

Ends = tuple[int, int, int, int, tuple[int, ...]]
"""(u, v, identity of rows, identity of cols, shape of costs)."""


def merge_parallel(problem: Problem) -> Outcome:
    """The problem with one edge per pair of nodes and maps, and one group per set of such edges."""
    pool = Pool()
    plain = [edge for index, edge in enumerate(problem.edges) if index not in problem.grouped]
    images: dict[tuple[Ends, ...], list[Edge]] = {}
    for group in problem.groups:
        members = {_ends(pool, problem.edges[index]): problem.edges[index] for index in group.edges}
        if len(members) == 1:
            plain.extend(members.values())
        else:
            ends = tuple(sorted(members))
            images.setdefault(ends, []).append(members[ends[0]])
    parallel = _parallel(pool, plain)
    if len(parallel) + sum(map(len, images)) == len(problem.edges) and len(images) == len(problem.groups):
        return None
    edges = [_sum(pool, alike) for alike in parallel]
    groups = []
    for key, firsts in images.items():
        costs = pool(add_costs([edge.costs for edge in firsts]))
        groups.append(Group(tuple(range(len(edges), len(edges) + len(key)))))
        edges += [Edge(u, v, pool.array(rows), pool.array(cols), costs) for u, v, rows, cols, _ in key]
    tables = [identity(len(node.costs)) for node in problem.nodes]
    way_back = Substitution(range(len(tables)), tables, len(tables))
    return Reduced(replace(problem, edges=tuple(edges), groups=tuple(groups)), way_back)


def _ends(pool: Pool, edge: Edge) -> Ends:
    return edge.u, edge.v, id(pool(edge.rows)), id(pool(edge.cols)), edge.costs.shape


def _parallel(pool: Pool, edges: Iterable[Edge]) -> list[list[Edge]]:
    """The edges that add up, class by class; an edge may be turned around for that."""
    classes: dict[Ends, list[Edge]] = {}
    for edge in edges:
        if edge.u > edge.v:
            edge = Edge(edge.v, edge.u, edge.cols, edge.rows, pool.transposed(edge.costs))
        classes.setdefault(_ends(pool, edge), []).append(edge)
    return list(classes.values())


def _sum(pool: Pool, edges: list[Edge]) -> Edge:
    first = edges[0]
    if len(edges) == 1:
        return first
    return Edge(first.u, first.v, first.rows, first.cols, pool(add_costs([edge.costs for edge in edges])))
