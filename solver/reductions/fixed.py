"""A node whose choice is fixed loses its other strategies. Exact, since no valid assignment chooses one of them."""

from __future__ import annotations

import numpy as np

from ..problem import IntArray, Problem
from .reduction import Outcome
from .restrict import restrict


def keep_fixed(problem: Problem) -> Outcome:
    """The problem without the strategies that fixed choices rule out."""
    if not problem.fixed:
        return None
    keep: list[IntArray | None] = [None] * len(problem.nodes)
    for node, strategy in problem.fixed.items():
        keep[node] = np.array([strategy], np.int64)
    return restrict(problem, keep)
