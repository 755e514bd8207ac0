"""What any assignment uses at least: where that is over the limit, no backend has to find out."""

from __future__ import annotations

from .evaluate import added_up
from .problem import Problem


def least_usage(problem: Problem) -> int:
    """Bytes that every assignment uses at some time step, at least: each load as small as any strategy has it. What
    copies hold comes on top.
    """
    loads = ((lo, hi, int(usages.min())) for node in problem.nodes for (lo, hi), usages in node.loads)
    return max((usage for _, usage in added_up(loads)), default=0)


def is_out_of_reach(problem: Problem) -> bool:
    """Whether every assignment is over the usage limit."""
    limited = problem.usage_limit is not None and problem.usage_price is None
    return limited and least_usage(problem) > (problem.usage_limit or 0)
