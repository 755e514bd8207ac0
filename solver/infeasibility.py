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


def explain_infeasibility(problem: Problem, minimise: Minimise) -> str:
    """A sentence or two: the fixed choices that contradict each other, or the smallest limits that would work.

    minimise: solves a problem within the time that is left; what it leaves open is said to be open.
    """
    free = replace(_without_costs(problem), usage_limit=None, usage_price=None, budgets=())
    answer = minimise(free)
    if answer.infeasible:
        return _contradiction(free, minimise)
    parts = []
    if problem.usage_limit is not None:
        parts.append(_smallest_usage_limit(problem, free, minimise))
    parts += [_smallest_budget(budget, free, minimise) for budget in problem.budgets]
    if _open(answer) or None in parts:
        parts.append("why was not found out in the time left")
    found = [part for part in parts if part]
    if found:
        return "; ".join(found)
    several = problem.budgets or problem.usage_limit is not None
    return "every limit can be kept alone, but not all of them together" if several else ""


def _open(answer: Answer) -> bool:
    """Whether the time ended before anything was known."""
    return answer.choices is None and not answer.infeasible


def _contradiction(free: Problem, minimise: Minimise) -> str:
    left_open = False

    def contradict(nodes: Sequence[int]) -> bool:
        nonlocal left_open
        answer = minimise(replace(free, fixed={node: free.fixed[node] for node in nodes}))
        left_open |= _open(answer)
        return answer.infeasible

    absent = "absent pairs and networks" if free.networks else "absent pairs"
    if contradict(()):
        return f"the {absent} alone leave no assignment, whatever is fixed"
    needed = _minimal(sorted(free.fixed), contradict)
    choices = ", ".join(f"{free.nodes[node].name!r} = {free.fixed[node]}" for node in needed)
    if left_open:
        return f"among these fixed choices, or in the {absent} alone, is a contradiction (time ended): {choices}"
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


def _smallest_usage_limit(problem: Problem, free: Problem, minimise: Minimise) -> str | None:
    """Minimises the peak: with a limit of 0 and a price of 1 per byte over it the objective is the peak.

    "" if the limit can be kept, None if that was not found out.
    """
    limit = problem.usage_limit
    assert limit is not None
    peak = minimise(replace(free, usage_limit=0, usage_price=1))
    if peak.bound is not None and peak.bound > limit and peak.choices is None:
        return f"the usage limit must be at least {peak.bound}"
    if peak.choices is None:
        return None
    judged = evaluate(replace(problem, budgets=()), peak.choices, peak.routes)
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


def _smallest_budget(budget: Budget, free: Problem, minimise: Minimise) -> str | None:
    """ "" if the budget can be kept, None if that was not found out."""
    nodes = list(free.nodes)
    for node, usages in budget.usages.items():
        nodes[node] = Node(nodes[node].name, np.where(nodes[node].costs >= INFEASIBLE, INFEASIBLE, usages))
    least = minimise(replace(free, nodes=tuple(nodes)))
    if least.bound is not None and least.bound > budget.limit:
        more = least.bound - budget.limit
        return f"budget {budget.name!r} must be at least {least.bound}, {more} more than its limit"
    if least.assignment is None:
        return None
    kept = evaluate(replace(free, nodes=tuple(nodes)), *least.assignment).cost <= budget.limit
    return "" if kept else None


def _without_costs(problem: Problem) -> Problem:
    """The same feasible assignments, all at cost 0."""
    known: dict[int, IntArray] = {}

    def presence(costs: IntArray) -> IntArray:
        if id(costs) not in known:
            known[id(costs)] = np.where(costs >= INFEASIBLE, INFEASIBLE, 0)
        return known[id(costs)]

    nodes = tuple(Node(node.name, presence(node.costs), further_loads=node.loads) for node in problem.nodes)
    edges = tuple(Edge(edge.u, edge.v, edge.rows, edge.cols, presence(edge.costs)) for edge in problem.edges)
    networks = tuple(replace(network, costs=presence(network.costs)) for network in problem.networks)
    return replace(problem, nodes=nodes, edges=edges, groups=(), networks=networks, offset=0)
