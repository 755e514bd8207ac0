"""Only the time steps at which memory can bind are kept, renumbered 0, 1, 2 ...

A step is needed only where the set of live loads is maximal: a load starts there and, before any other starts, one
ends. Elsewhere fewer loads are live than at a kept step, and usages are not negative. A kept step can never bind if
the largest usages of the loads live there fit together; the loads live at no remaining step do not matter. Without a
limit no load does. Where networks hold memory, too, all steps are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ..problem import IntArray, Load, Node, Problem, identity
from .reduction import Outcome, Reduced, Substitution


def keep_binding_steps(problem: Problem) -> Outcome:
    """The problem on the steps that can bind."""
    if not any(node.loads for node in problem.nodes) or any(network.lives for network in problem.networks):
        return None
    steps = _binding_steps(problem)
    nodes = tuple(_on_steps(node, steps) for node in problem.nodes)
    if all(new is old for new, old in zip(nodes, problem.nodes, strict=True)):
        return None
    tables = [identity(len(node.costs)) for node in problem.nodes]
    return Reduced(replace(problem, nodes=nodes), Substitution(range(len(nodes)), tables, len(nodes)))


def _binding_steps(problem: Problem) -> list[int]:
    if problem.usage_limit is None:
        return []
    starts: Counter[int] = Counter()
    ends: Counter[int] = Counter()
    for node in problem.nodes:
        for (lo, hi), usages in node.loads:
            largest = int(usages.max())
            starts[lo] += largest
            ends[hi] += largest
    times = sorted(starts.keys() | ends.keys())
    steps, live = [], 0
    for time, following in pairwise(times):
        live += starts[time] - ends[time]
        if time in starts and following in ends and live > problem.usage_limit:
            steps.append(time)
    return steps


def _on_steps(node: Node, steps: list[int]) -> Node:
    by_interval: dict[tuple[int, int], list[IntArray]] = {}
    for (lo, hi), usages in node.loads:
        new = (bisect_left(steps, lo), bisect_left(steps, hi))
        if new[0] < new[1] and usages.any():
            by_interval.setdefault(new, []).append(usages)
    loads = tuple(Load(new, _total(usages)) for new, usages in sorted(by_interval.items()))
    same = [load.interval for load in loads] == [load.interval for load in node.loads]
    return node if same else Node(node.name, node.costs, further_loads=loads)


def _total(usages: list[IntArray]) -> IntArray:
    return usages[0] if len(usages) == 1 else np.add.reduce(usages)
