"""The only judge of an assignment. Shares no code with any reduction or backend, and counts in Python integers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .problem import INFEASIBLE, Problem, ProblemError


@dataclass(frozen=True)
class Evaluation:
    """What an assignment costs and whether it may be used.

    Attributes:
        cost: the objective, exact; every forbidden strategy or absent pair adds INFEASIBLE (10^18).
        feasible: nothing is violated.
        violations: one sentence per broken constraint, in the order strategies, pairs, fixed, ties, usage, budgets.
        peak_usage: largest number of bytes in use at a time step.
        peak_step: the first step at which it is reached; None where no load is ever live.
    """

    cost: int
    feasible: bool
    violations: tuple[str, ...]
    peak_usage: int
    peak_step: int | None


def evaluate(problem: Problem, choices: Sequence[int]) -> Evaluation:
    """Judges `choices`, one strategy index per node.

    Raises:
        ProblemError: there is not one choice per node, or one of them is not a strategy of its node.
    """
    _check(problem, choices)
    violations: list[str] = []
    cost = problem.offset + _nodes_cost(problem, choices, violations) + _edges_cost(problem, choices, violations)
    for node, strategy in sorted(problem.fixed.items()):
        if choices[node] != strategy:
            violations.append(f"node {node} is fixed to strategy {strategy} and chose {choices[node]}")
    for tie in problem.ties:
        if len({choices[node] for node in tie}) > 1:
            violations.append(f"the tied nodes {', '.join(map(str, tie[:8]))} chose different strategies")
    peak_usage, peak_step = _peak(problem, choices)
    over = 0 if problem.usage_limit is None else max(0, peak_usage - problem.usage_limit)
    if problem.usage_price is not None:
        cost += problem.usage_price * over
    elif over:
        violations.append(f"usage is {peak_usage} at step {peak_step}, over the limit {problem.usage_limit}")
    for budget in problem.budgets:
        used = sum(int(usages[choices[node]]) for node, usages in budget.usages.items())
        if used > budget.limit:
            violations.append(f"budget {budget.name!r} uses {used}, over its limit {budget.limit}")
    return Evaluation(cost, not violations, tuple(violations), peak_usage, peak_step)


def usage_timeline(problem: Problem, choices: Sequence[int]) -> list[tuple[int, int]]:
    """Bytes in use as steps: (t, usage) means that usage from t up to the next entry's t. Ends with usage 0."""
    changes: Counter[int] = Counter()
    for node, choice in zip(problem.nodes, choices, strict=True):
        for (lo, hi), usages in node.loads:
            used = int(usages[choice])
            changes[lo] += used
            changes[hi] -= used
    steps = sorted(changes)
    return list(zip(steps, accumulate(changes[step] for step in steps), strict=True))


def _check(problem: Problem, choices: Sequence[int]) -> None:
    if len(choices) != len(problem.nodes):
        raise ProblemError(f"there are {len(choices)} choices for {len(problem.nodes)} nodes: expected one per node")
    for index, (node, choice) in enumerate(zip(problem.nodes, choices, strict=True)):
        if not 0 <= choice < len(node.costs):
            raise ProblemError(f"node {index} has {len(node.costs)} strategies, {choice} is not one of them")


def _nodes_cost(problem: Problem, choices: Sequence[int], violations: list[str]) -> int:
    total = 0
    for index, (node, choice) in enumerate(zip(problem.nodes, choices, strict=True)):
        cost = int(node.costs[choice])
        total += cost
        if cost >= INFEASIBLE:
            violations.append(f"node {index} chose its forbidden strategy {choice}")
    return total


def _edges_cost(problem: Problem, choices: Sequence[int], violations: list[str]) -> int:
    group_of = {edge: index for index, group in enumerate(problem.groups) for edge in group.edges}
    paid: set[tuple[int, int]] = set()
    total = 0
    for index, edge in enumerate(problem.edges):
        column = int(edge.cols[choices[edge.v]])
        cost = int(edge.costs[edge.rows[choices[edge.u]], column])
        if cost >= INFEASIBLE:
            pair = f"({choices[edge.u]}, {choices[edge.v]})"
            violations.append(f"edge {index} ({edge.u}, {edge.v}) has no pair {pair}")
        if index in group_of:
            if (group_of[index], column) in paid:
                continue
            paid.add((group_of[index], column))
        total += cost
    return total


def _peak(problem: Problem, choices: Sequence[int]) -> tuple[int, int | None]:
    timeline = usage_timeline(problem, choices)
    if not timeline:
        return 0, None
    peak = max(usage for _, usage in timeline)
    return peak, next(step for step, usage in timeline if usage == peak)
