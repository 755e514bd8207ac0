"""A strategy that fits memory under no assignment is dropped.

At every step all loads that are live use at least their least usage. What the limit leaves above the sum of those is
spare, and no load can use more than its own least usage plus the spare of every step that it lives at. Exact because an
assignment with such a strategy is over the limit at that step, whatever the others choose. Only where the limit is
hard; where even the least usages are over it, there is no assignment.
"""

from __future__ import annotations

import numpy as np

from ..problem import IntArray, Problem
from .reduction import Contradiction, Outcome
from .restrict import restrict


def drop_oversized(problem: Problem) -> Outcome:
    """The problem without the strategies that alone leave too little memory for the least of the others."""
    loads = [
        (index, load)
        for index, node in enumerate(problem.nodes)
        for load in node.loads
        if load.interval[0] < load.interval[1]
    ]
    if problem.usage_limit is None or problem.usage_price is not None or not loads:
        return None
    lo, hi = (np.array([load.interval[end] for _, load in loads], np.int64) for end in (0, 1))
    least = np.array([load.usages.min() for _, load in loads], np.int64)
    changes = np.zeros(int(hi.max()) + 1, np.int64)
    np.add.at(changes, lo, least)
    np.subtract.at(changes, hi, least)
    spare = problem.usage_limit - np.cumsum(changes)[:-1]
    if spare.min() < 0:
        return Contradiction(f"the least usages of all nodes are together {-spare.min()} over the usage limit")
    fits = [np.ones(len(node.costs), np.bool_) for node in problem.nodes]
    for (index, load), most in zip(loads, (least + _least_within(spare, lo, hi)).tolist(), strict=True):
        fits[index] &= load.usages <= most
    empty = [problem.nodes[index].name for index, fit in enumerate(fits) if not fit.any()]
    if empty:
        return Contradiction(f"no strategy of {empty[0]!r} leaves enough memory for the least of the other nodes")
    if all(fit.all() for fit in fits):
        return None
    return restrict(problem, [None if fit.all() else np.flatnonzero(fit) for fit in fits])


def _least_within(values: IntArray, lo: IntArray, hi: IntArray) -> IntArray:
    """Per interval [lo, hi) the least of the values in it, from the least values of spans of 1, 2, 4 .. steps."""
    spans = [values]
    while 2 ** len(spans) <= len(values):
        half = 2 ** (len(spans) - 1)
        spans.append(np.minimum(spans[-1][:-half], spans[-1][half:]))
    least = np.empty(len(lo), np.int64)
    level = np.frexp((hi - lo).astype(np.float64))[1] - 1
    for k, span in enumerate(spans):
        at = np.flatnonzero(level == k)
        least[at] = np.minimum(span[lo[at]], span[hi[at] - 2**k])
    return least
