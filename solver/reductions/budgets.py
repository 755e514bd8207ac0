"""Budgets become time steps of their own, so that everything else knows one limit over time only.

Let U be the largest of all limits. Budget b takes the step T + b after the last step T - 1 of the loads: its usages are
live there alone, beside a constant load of U minus its limit. The steps before get a constant load of U minus the usage
limit. Exact because usages + U - limit <= U says usages <= limit. Without a usage limit the loads of the nodes go away.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..problem import Load, Node, Problem, identity
from .reduction import Outcome, Reduced, Substitution

CONSTANT = "unused parts of limits"


def merge_budgets(problem: Problem) -> Outcome:
    """The problem with its budgets as steps of the timeline, and one constant node more."""
    if not problem.budgets:
        return None
    limited = problem.usage_limit is not None
    loads = [list(node.loads) if limited else [] for node in problem.nodes]
    end = max((load.interval[1] for of_node in loads for load in of_node), default=0)
    limits = [budget.limit for budget in problem.budgets]
    largest = max([*limits, problem.usage_limit or 0])
    constant = [Load((end + b, end + b + 1), _one(largest - limit)) for b, limit in enumerate(limits)]
    if problem.usage_limit is not None and end:
        constant.append(Load((0, end), _one(largest - problem.usage_limit)))
    for b, budget in enumerate(problem.budgets):
        for node, usages in budget.usages.items():
            loads[node].append(Load((end + b, end + b + 1), np.asarray(usages, np.int64)))
    nodes = [
        Node(node.name, node.costs, further_loads=tuple(own)) for node, own in zip(problem.nodes, loads, strict=True)
    ]
    nodes.append(Node(CONSTANT, _one(0), further_loads=tuple(constant)))
    merged = replace(problem, nodes=tuple(nodes), usage_limit=largest, budgets=())
    tables = [identity(len(node.costs)) for node in problem.nodes]
    return Reduced(merged, Substitution(range(len(tables)), tables, len(nodes)))


def _one(value: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array([value], np.int64)
