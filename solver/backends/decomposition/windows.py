"""Large neighbourhood search: all nodes but a window keep their choices, and the window is solved as a problem.

The window's problem holds the window, its neighbours with the one strategy they chose, and one background node that
uses at every step what all others use. Between two changes of the window's own usage only the largest usage of the
others counts, so the background needs one load per such span. Source: Shaw, "Using constraint programming and local
search methods to solve vehicle routing problems", 1998.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from ...networks import Consumer
from ...problem import Edge, Group, IntArray, Load, Node, Problem


class Windows:
    """Cuts windows out of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.edges_of: list[list[int]] = [[] for _ in problem.nodes]
        for index, edge in enumerate(problem.edges):
            self.edges_of[edge.u].append(index)
            self.edges_of[edge.v].append(index)
        self.networks_of: list[list[int]] = [[] for _ in problem.nodes]
        for index, network in enumerate(problem.networks):
            for node in {node for node, _ in network.ends}:
                self.networks_of[node].append(index)
        self.group_of = {edge: index for index, group in enumerate(problem.groups) for edge in group.edges}
        self.steps = max((load.interval[1] for node in problem.nodes for load in node.loads), default=0)

    def grown(self, seeds: list[int], strategies: int, rng: np.random.Generator) -> list[int]:
        """Nodes around the seeds, nearest first, with about so many strategies together."""
        window: dict[int, None] = {}
        waiting = deque(seeds)
        left = strategies
        while waiting and left > 0:
            node = waiting.popleft()
            if node in window:
                continue
            window[node] = None
            left -= len(self.problem.nodes[node].costs)
            around = self._around(node)
            waiting.extend(around[position] for position in rng.permutation(len(around)).tolist())
        return list(window)

    def _around(self, node: int) -> list[int]:
        """The other ends of the node's edges and networks."""
        edges = (self.problem.edges[index] for index in self.edges_of[node])
        networks = (self.problem.networks[index] for index in self.networks_of[node])
        ends = (end for network in networks for end, _ in network.ends)
        return [edge.v if edge.u == node else edge.u for edge in edges] + [end for end in ends if end != node]

    def cut(self, window: list[int], choices: list[int], usage: IntArray) -> Problem:
        """The problem of the window, its nodes first; the others keep `choices`, which use `usage` over time."""
        problem = self.problem
        indices = sorted({index for node in window for index in self.edges_of[node]})
        groups = sorted({self.group_of[index] for index in indices if index in self.group_of})
        indices = sorted({*indices, *(index for group in groups for index in problem.groups[group].edges)})
        number = {node: position for position, node in enumerate(window)}
        nodes = [problem.nodes[node] for node in window]
        networks = [problem.networks[k] for k in sorted({k for node in window for k in self.networks_of[node]})]
        ends = [node for index in indices for node in (problem.edges[index].u, problem.edges[index].v)]
        for node in ends + [node for network in networks for node, _ in network.ends]:
            if node not in number:
                number[node] = len(nodes)
                nodes.append(Node("", problem.nodes[node].costs[choices[node], None]))
        inside = set(window)

        def mapped(classes: IntArray, node: int) -> IntArray:
            return classes if node in inside else classes[choices[node], None]

        edges = []
        for index in indices:
            edge = problem.edges[index]
            rows, cols = mapped(edge.rows, edge.u), mapped(edge.cols, edge.v)
            edges.append(Edge(number[edge.u], number[edge.v], rows, cols, edge.costs))
        place = {index: position for position, index in enumerate(indices)}
        kept = tuple(Group(tuple(place[index] for index in problem.groups[group].edges)) for group in groups)
        if problem.usage_limit is not None:
            nodes.append(self._background(window, choices, usage))
        limit, price = problem.usage_limit, problem.usage_price
        local = tuple(
            network.between(lambda node, at: Consumer(number[node], mapped(at, node))) for network in networks
        )
        return Problem(tuple(nodes), tuple(edges), kept, usage_limit=limit, usage_price=price, networks=local)

    def _background(self, window: list[int], choices: list[int], usage: IntArray) -> Node:
        others = usage.copy()
        ends = {0, self.steps}
        for node in window:
            for (lo, hi), usages in self.problem.nodes[node].loads:
                others[lo:hi] -= usages[choices[node]]
                ends.update((lo, hi))
        spans = sorted(ends)
        largest: list[int] = np.maximum.reduceat(others, spans[:-1]).tolist() if self.steps else []
        loads = (
            Load((lo, hi), np.array([used], np.int64))
            for lo, hi, used in zip(spans[:-1], spans[1:], largest, strict=True)
        )
        return Node("others", np.zeros(1, np.int64), further_loads=tuple(loads))
