"""What any assignment uses at least: where that is over the limit, no backend has to find out."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from .problem import Problem


def least_usage(problem: Problem) -> int:
    """Bytes that every assignment uses at some time step, at least: each load as small as any strategy has it. What
    copies hold comes on top.
    """
    changes: dict[int, int] = defaultdict(int)
    for node in problem.nodes:
        for (lo, hi), usages in node.loads:
            least = int(usages.min())
            changes[lo] += least
            changes[hi] -= least
    return max(accumulate(changes[step] for step in sorted(changes)), default=0)


def is_out_of_reach(problem: Problem) -> bool:
    """Whether every assignment is over the usage limit."""
    limited = problem.usage_limit is not None and problem.usage_price is None
    return limited and least_usage(problem) > (problem.usage_limit or 0)
