"""Drops strategies of nodes: the common last step of the reductions that only rule strategies out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..problem import Edge, IntArray, Load, Node, Problem, identity
from .reduction import Pool, Reduced, Substitution


def restrict(problem: Problem, keep: Sequence[IntArray | None]) -> Reduced:
    """The problem in which node i keeps the strategies keep[i], ascending; None keeps all. Fixed choices are dropped.

    Edge matrices are left as they are: rows and columns without a strategy are dropped by `compact_edges`.
    """
    pool = Pool()
    keep = [None if kept is None else pool(kept) for kept in keep]
    cache: dict[tuple[int, int], IntArray] = {}

    def cut(array: IntArray, kept: IntArray | None) -> IntArray:
        if kept is None:
            return array
        key = (id(array), id(kept))
        if key not in cache:
            cache[key] = pool(array[kept])
        return cache[key]

    nodes = tuple(
        node if kept is None else _cut_node(node, kept) for node, kept in zip(problem.nodes, keep, strict=True)
    )
    edges = tuple(
        edge
        if keep[edge.u] is None and keep[edge.v] is None
        else Edge(edge.u, edge.v, cut(edge.rows, keep[edge.u]), cut(edge.cols, keep[edge.v]), edge.costs)
        for edge in problem.edges
    )
    tables = [
        identity(len(node.costs)) if kept is None else kept for node, kept in zip(problem.nodes, keep, strict=True)
    ]
    way_back = Substitution(range(len(nodes)), tables, len(nodes))
    networks = way_back.of_networks(problem.networks)
    smaller = replace(problem, nodes=nodes, edges=edges, fixed={}, networks=networks)
    return Reduced(smaller, way_back)


def _cut_node(node: Node, kept: IntArray) -> Node:
    loads = tuple(Load(interval, usages[kept]) for interval, usages in node.loads)
    return Node(node.name, node.costs[kept], further_loads=loads)
