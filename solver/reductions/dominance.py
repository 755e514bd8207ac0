"""A strategy is dropped when another of its node is never worse.

For strategies p, q of node i let worst[q, p] be an upper bound on the change of the objective when i moves from p to q,
whatever all other nodes choose. With worst[q, p] <= 0 and no load of q above that of p, moving any feasible assignment
from p to q keeps it feasible at no higher cost, so p is never needed. The bound adds up

    the node:             costs[q] - costs[p]
    an edge:              max over m of  e[q, m] - e[p, m]     (finite e[p, m] only; infinite if some e[q, m] is absent)
    a group, as producer: with d_m = e[q, m] - e[p, m] and k consumers, between 1 and k distinct m are paid:
                          the k largest positive d_m together, or the largest d_m where none is positive
    a group, as consumer: 0 for the same column, else max over rows l of e[l, m_q], as though p's column was paid anyway

Every term is subadditive (worst[r, p] <= worst[r, q] + worst[q, p]), so dominance is transitive and all dominated
strategies can go at once; of equivalent ones the first stays. The moves of different nodes do not disturb each other,
because each bound holds for all choices of the others. Source: Goldstein, "Efficient rotamer elimination", 1994, whose
criterion for pairwise energies this is; the terms of groups are ours.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..problem import INFEASIBLE, IntArray, Problem
from .reduction import Outcome
from .restrict import restrict

ENTRIES_AT_ONCE = 1 << 20
MOST_ENTRIES = 10**9
"""Differences computed in one call: some ten seconds. Nodes that would need more keep their strategies."""


def drop_dominated(problem: Problem) -> Outcome:
    """The problem without dominated strategies. Nodes of networks keep all of theirs."""
    worst = _WorstChanges(problem)
    in_networks = {node for network in problem.networks for node, _ in network.ends}
    keep: list[IntArray | None] = []
    for index, node in enumerate(problem.nodes):
        left_alone = len(node.costs) == 1 or index in in_networks
        dominated = np.zeros(len(node.costs), np.bool_) if left_alone else worst.dominated(index)
        keep.append(np.flatnonzero(~dominated) if dominated.any() else None)
    return None if all(kept is None for kept in keep) else restrict(problem, keep)


class _WorstChanges:
    """Bounds per pair of rows or columns, computed once per matrix and role. Entry [q, p] is for a move from p to q."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cache: dict[tuple[int, str, int], IntArray] = {}
        self.entries = 0
        members = {edge: len(group.edges) for group in problem.groups for edge in group.edges}
        produced = {group.edges[0] for group in problem.groups}
        # Per node: (matrix, classes of its strategies, role, consumers of the group).
        self.terms: list[list[tuple[IntArray, IntArray, str, int]]] = [[] for _ in problem.nodes]
        for index, edge in enumerate(problem.edges):
            if index not in members:
                self.terms[edge.u].append((edge.costs, edge.rows, "rows", 0))
                self.terms[edge.v].append((edge.costs, edge.cols, "columns", 0))
                continue
            self.terms[edge.v].append((edge.costs, edge.cols, "consumer", 0))
            if index in produced:
                self.terms[edge.u].append((edge.costs, edge.rows, "producer", members[index]))

    def dominated(self, index: int) -> npt.NDArray[np.bool_]:
        """Per strategy of the node, whether another one makes it superfluous."""
        node = self.problem.nodes[index]
        change = node.costs[:, None] - node.costs[None, :]
        possible = np.ones(change.shape, np.bool_)
        np.fill_diagonal(possible, False)
        for usages in {id(load.usages): load.usages for load in node.loads}.values():
            possible &= usages[:, None] <= usages[None, :]
        for costs, classes, role, consumers in self.terms[index]:
            if not possible.any() or not self._affordable(costs, role, consumers):
                return np.zeros(len(change), np.bool_)
            term = self._changes(costs, role, consumers)[classes[:, None], classes[None, :]]
            possible &= term < INFEASIBLE
            change = change + np.where(possible, term, 0)
        better = possible & (change <= 0)
        first = np.arange(len(change))
        superfluous = better & (~better.T | (first[:, None] < first[None, :]))
        return np.asarray(superfluous.any(axis=0), np.bool_)

    def _affordable(self, costs: IntArray, role: str, consumers: int) -> bool:
        if (id(costs), role, consumers) not in self.cache:
            self.entries += costs.size * costs.shape[0 if role in ("rows", "producer") else 1]
        return self.entries <= MOST_ENTRIES

    def _changes(self, costs: IntArray, role: str, consumers: int) -> IntArray:
        key = (id(costs), role, consumers)
        if key not in self.cache:
            if role == "rows":
                self.cache[key] = _largest_difference(costs)
            elif role == "columns":
                self.cache[key] = _largest_difference(costs.T)
            elif role == "consumer":
                self.cache[key] = _full_price(costs)
            else:
                self.cache[key] = _largest_sum(costs, consumers)
        return self.cache[key]


def _differences(costs: IntArray) -> list[tuple[slice, IntArray]]:
    """(some rows q, d[q, p, m] = costs[q, m] - costs[p, m]) in parts; -INFEASIBLE where (p, m) is absent."""
    step = max(1, ENTRIES_AT_ONCE // max(1, costs.size))
    absent = costs >= INFEASIBLE
    parts = []
    for start in range(0, len(costs), step):
        part = slice(start, start + step)
        d = costs[part, None, :] - costs[None, :, :]
        d = np.where(absent[part, None, :], INFEASIBLE, d)
        parts.append((part, np.where(absent[None, :, :], -INFEASIBLE, d)))
    return parts


def _largest_difference(costs: IntArray) -> IntArray:
    worst = np.empty((len(costs), len(costs)), np.int64)
    for part, d in _differences(costs):
        worst[part] = d.max(axis=2)
    return np.where(worst == -INFEASIBLE, 0, worst)


def _largest_sum(costs: IntArray, consumers: int) -> IntArray:
    worst = np.empty((len(costs), len(costs)), np.int64)
    for part, d in _differences(costs):
        largest = d.max(axis=2)
        top = -np.sort(-np.maximum(d, 0), axis=2)[:, :, :consumers]
        total = np.where((top >= INFEASIBLE).any(axis=2), INFEASIBLE, np.where(top < INFEASIBLE, top, 0).sum(axis=2))
        worst[part] = np.where(largest > 0, total, largest)
    return np.where(worst == -INFEASIBLE, 0, worst)


def _full_price(costs: IntArray) -> IntArray:
    """[m_q, m_p]: the largest costs[l, m_q] over the rows l in which m_p is present; 0 on the diagonal."""
    present = costs < INFEASIBLE
    price: IntArray = np.where(present.T[None, :, :], costs.T[:, None, :], 0).max(axis=2)
    np.fill_diagonal(price, 0)
    return price
