"""Why a problem has no feasible assignment, and what would give it one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .backends import Answer
from .evaluate import evaluate
from .problem import INFEASIBLE, Budget, Edge, IntArray, Node, Problem

LARGEST_SHOWN = 5

Minimise = Callable[[Problem], Answer]


def explain(problem: Problem, minimise: Minimise) -> str:
    """A sentence or two: the fixed choices that contradict each other, or the smallest limits that would work.

    minimise: solves a problem within the time that is left.
    """
    free = replace(_without_costs(problem), usage_limit=None, usage_price=None, budgets=())
    if minimise(free).infeasible:
        return _contradiction(free, minimise)
    parts = []
    if problem.usage_limit is not None:
        parts.append(_smallest_usage_limit(problem, free, minimise))
    parts += [_smallest_budget(budget, free, minimise) for budget in problem.budgets]
    found = [part for part in parts if part]
    if found:
        return "; ".join(found)
    several = problem.budgets or problem.usage_limit is not None
    return "every limit can be kept alone, but not all of them together" if several else ""


def _contradiction(free: Problem, minimise: Minimise) -> str:
    def contradict(nodes: Sequence[int]) -> bool:
        return minimise(replace(free, fixed={node: free.fixed[node] for node in nodes})).infeasible

    if contradict(()):
        return "the absent pairs alone leave no assignment, whatever is fixed"
    needed = _minimal(sorted(free.fixed), contradict)
    choices = ", ".join(f"{free.nodes[node].name!r} = {free.fixed[node]}" for node in needed)
    return f"these fixed choices contradict each other, and without any one of them they do not: {choices}"


def _minimal(nodes: Sequence[int], contradict: Callable[[Sequence[int]], bool]) -> list[int]:
    """A minimal contradicting subset of contradicting nodes. Source: Junker, "QuickXplain", 2004."""

    def needed(background: list[int], added: bool, among: list[int]) -> list[int]:
        if added and contradict(background):
            return []
        if len(among) <= 1:
            return among
        half = len(among) // 2
        right = needed(background + among[:half], True, among[half:])
        left = needed(background + right, bool(right), among[:half])
        return left + right

    return sorted(needed([], False, list(nodes)))


def _smallest_usage_limit(problem: Problem, free: Problem, minimise: Minimise) -> str:
    """Minimises the peak: with a limit of 0 and a price of 1 per byte over it the objective is the peak."""
    limit = problem.usage_limit
    assert limit is not None
    peak = minimise(replace(free, usage_limit=0, usage_price=1))
    if peak.choices is None:
        return "" if peak.bound is None or peak.bound <= limit else f"the usage limit must be at least {peak.bound}"
    judged = evaluate(replace(problem, budgets=()), peak.choices)
    if judged.peak_usage <= limit or judged.peak_step is None:
        return ""
    exact = "" if peak.bound == judged.peak_usage else f" (at least {peak.bound or 0} is needed)"
    live = _largest_live(problem, peak.choices, judged.peak_step)
    return (
        f"the smallest usage limit found to work is {judged.peak_usage}{exact}, {judged.peak_usage - limit} more than "
        f"{limit}; at its peak, step {judged.peak_step}, the largest live are {live}"
    )


def _largest_live(problem: Problem, choices: tuple[int, ...], step: int) -> str:
    live = sorted(
        (-sum(int(usages[choice]) for (lo, hi), usages in node.loads if lo <= step < hi), node.name)
        for node, choice in zip(problem.nodes, choices, strict=True)
    )
    return ", ".join(f"{name!r} {-used}" for used, name in live[:LARGEST_SHOWN] if used)


def _smallest_budget(budget: Budget, free: Problem, minimise: Minimise) -> str:
    nodes = list(free.nodes)
    for node, usages in budget.usages.items():
        nodes[node] = Node(nodes[node].name, np.where(nodes[node].costs >= INFEASIBLE, INFEASIBLE, usages))
    least = minimise(replace(free, nodes=tuple(nodes)))
    if least.bound is None or least.bound <= budget.limit:
        return ""
    return f"budget {budget.name!r} must be at least {least.bound}, {least.bound - budget.limit} more than its limit"


def _without_costs(problem: Problem) -> Problem:
    """The same feasible assignments, all at cost 0."""
    known: dict[int, IntArray] = {}

    def presence(costs: IntArray) -> IntArray:
        if id(costs) not in known:
            known[id(costs)] = np.where(costs >= INFEASIBLE, INFEASIBLE, 0)
        return known[id(costs)]

    nodes = tuple(Node(node.name, presence(node.costs), further_loads=node.loads) for node in problem.nodes)
    edges = tuple(Edge(edge.u, edge.v, edge.rows, edge.cols, presence(edge.costs)) for edge in problem.edges)
    return replace(problem, nodes=nodes, edges=edges, groups=(), offset=0)
