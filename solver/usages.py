"""Usages so large that their sums do not fit int64, or they no double, are cut where that is exact, or refused.

Under a hard limit L a usage above L never fits, so L + 1 says as much. A limit that all largest usages keep together
cannot bind and goes away. What is left after that must be small enough for exact arithmetic.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .problem import Budget, Load, Node, Problem, ProblemError

LARGEST_USAGE = 2**53
"""Of one strategy and of a limit: the solvers compute with doubles."""

LARGEST_TOTAL = 2**62
"""Of the largest usages of all loads together: timelines are added in int64."""


def exact_usages(problem: Problem) -> Problem:
    """The problem with the same answers and with usages that can be added exactly.

    Raises:
        ProblemError: a limit that can bind, or the usages under it, are too large.
    """
    problem = _exact_loads(problem)
    budgets = tuple(budget for budget in map(_exact_budget, problem.budgets) if budget is not None)
    total = largest_usage(problem) if problem.usage_limit is not None else 0
    total += sum(int(usages.max()) for budget in budgets for usages in budget.usages.values())
    if total >= LARGEST_TOTAL:
        raise ProblemError(
            f"the largest usages add up to {total}: give usages and limits in a larger unit, to be exact"
        )
    return problem if budgets == problem.budgets else replace(problem, budgets=budgets)


def largest_usage(problem: Problem) -> int:
    """Bytes that all loads and copies would need together, each at its largest: no step needs more."""
    copies = sum(
        int(network.sizes.sum()) * len(network.lives) for network in problem.networks if network.sizes is not None
    )
    return sum(_largest(node) for node in problem.nodes) + copies


def _exact_loads(problem: Problem) -> Problem:
    limit = problem.usage_limit
    if limit is None:
        return problem
    if largest_usage(problem) <= limit:
        return replace(problem, usage_limit=None, usage_price=None)
    largest = max((int(usages.max()) for node in problem.nodes for _, usages in node.loads), default=0)
    if problem.usage_price is not None:
        _check("usage_limit", max(limit, largest))
        return problem
    _check("usage_limit", limit)
    return problem if largest <= limit else replace(problem, nodes=tuple(_cut(node, limit) for node in problem.nodes))


def _exact_budget(budget: Budget) -> Budget | None:
    """The budget with its usages cut, or None if it cannot bind."""
    largest = {node: int(usages.max()) for node, usages in budget.usages.items()}
    if sum(largest.values()) <= budget.limit:
        return None
    _check(f"the limit of budget {budget.name!r}", budget.limit)
    cut = {node: np.minimum(usages, budget.limit + 1) for node, usages in budget.usages.items()}
    return replace(budget, usages=cut)


def _check(what: str, value: int) -> None:
    if value > LARGEST_USAGE:
        raise ProblemError(f"{what} or a usage under it is {value}: give them in a larger unit, up to {LARGEST_USAGE}")


def _largest(node: Node) -> int:
    return sum(int(usages.max()) for _, usages in node.loads)


def _cut(node: Node, limit: int) -> Node:
    loads = tuple(Load(interval, np.minimum(usages, limit + 1)) for interval, usages in node.loads)
    return Node(node.name, node.costs, further_loads=loads)
