"""Arc consistency: a strategy without a finite partner on some edge can never be chosen.

Exact because every assignment that chooses it is infeasible. Driven by a worklist of edges: when a node loses a
strategy, its edges are looked at again (AC-3; Mackworth, "Consistency in networks of relations", 1977).
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from ..problem import INFEASIBLE, Edge, Problem
from .reduction import Contradiction, Outcome
from .restrict import restrict

BoolArray = npt.NDArray[np.bool_]


def drop_unsupported(problem: Problem) -> Outcome:
    """The problem without the strategies that are forbidden or have no finite partner on some edge."""
    alive = [node.costs < INFEASIBLE for node in problem.nodes]
    finite = _finite_entries(problem)
    open_edges = [index for index, edge in enumerate(problem.edges) if not finite[id(edge.costs)].all()]
    edges_of: list[list[int]] = [[] for _ in problem.nodes]
    for index in open_edges:
        edges_of[problem.edges[index].u].append(index)
        edges_of[problem.edges[index].v].append(index)
    waiting, queued = deque(open_edges), set(open_edges)
    while waiting:
        index = waiting.popleft()
        queued.discard(index)
        edge = problem.edges[index]
        for node in _revise(edge, finite[id(edge.costs)], alive):
            again = [other for other in edges_of[node] if other != index and other not in queued]
            waiting.extend(again)
            queued.update(again)
    empty = [index for index, mask in enumerate(alive) if not mask.any()]
    if empty:
        names = ", ".join(repr(problem.nodes[index].name) for index in empty[:3])
        return Contradiction(f"no strategy of {names} fits any assignment of its neighbours")
    if all(mask.all() for mask in alive):
        return None
    return restrict(problem, [None if mask.all() else np.flatnonzero(mask) for mask in alive])


def _finite_entries(problem: Problem) -> dict[int, BoolArray]:
    matrices = {id(edge.costs): edge.costs for edge in problem.edges}
    return {key: costs < INFEASIBLE for key, costs in matrices.items()}


def _revise(edge: Edge, finite: BoolArray, alive: list[BoolArray]) -> list[int]:
    """Drops what the edge does not support, at both ends; the nodes that lost a strategy."""
    lost = []
    columns = np.bincount(edge.cols[alive[edge.v]], minlength=finite.shape[1]).astype(np.bool_)
    rows = np.bincount(edge.rows[alive[edge.u]], minlength=finite.shape[0]).astype(np.bool_)
    for node, supported in (
        (edge.u, np.asarray(finite[:, columns].any(axis=1))[edge.rows]),
        (edge.v, np.asarray(finite[rows].any(axis=0))[edge.cols]),
    ):
        left = alive[node] & supported
        if left.sum() < alive[node].sum():
            alive[node] = left
            lost.append(node)
    return lost
