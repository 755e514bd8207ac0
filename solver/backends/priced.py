"""A first answer where copies hold memory: the cheapest at a price on bytes, with copies that each phase makes anew.

The program with memory may be far from integral; without memory it is integral nearly always. So memory enters as a
price: on what nodes hold at the fullest steps, and on what producers make that is alive then, as if nothing was copied.
Nothing of the forward's copies is kept over the turn. The least price that leads to an answer within the limit is
looked for among powers of two; the fullest step of an answer over the limit joins those whose bytes are paid for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np

from ..evaluate import evaluate, usage_timeline
from ..networks import NOWHERE, Assignment, at_end
from ..problem import INFEASIBLE, IntArray, Problem
from ..routing import routed

PRICES = tuple(2.0**k for k in range(-8, 6))
"""Prices that are tried, in parts of (cost of the start) / (usage limit)."""


def priced_answer(
    problem: Problem, start: Assignment, choose: Callable[[Problem], Sequence[int] | None]
) -> Assignment | None:
    """An answer within the limit; None where none is found.

    Args:
        start: an answer that is not within the limit, such as the optimum without one.
        choose: the strategies of about the cheapest answer of a problem without memory; None if it finds none.
    """
    assert problem.usage_limit is not None
    steps = [fullest(problem, start)[0]]
    unit = max(1, abs(evaluate(problem, *start).cost)) / max(1, problem.usage_limit)
    low, high = 0, len(PRICES) - 1
    found: Assignment | None = None
    while low <= high:
        middle = (low + high) // 2
        priced = at_price(problem, held_over(problem, steps), PRICES[middle] * unit)
        choices = choose(priced)
        answer = None if choices is None else routed(priced, choices)
        if answer is not None and evaluate(problem, *answer).feasible:
            found, high = answer, middle - 1
            continue
        step = None if answer is None else fullest(problem, answer)[0]
        if step is None or step in steps:
            low = middle + 1
        else:
            steps.append(step)
    return found


def fullest(problem: Problem, answer: Assignment) -> tuple[int, int]:
    """The first step at which an answer holds most, and the bytes."""
    return max(usage_timeline(problem, *answer), key=itemgetter(1), default=(0, 0))


def held_over(problem: Problem, steps: Sequence[int]) -> list[IntArray]:
    """Per node the bytes that each of its strategies holds at these steps together, if nothing is copied."""
    first, *others = (held_at(problem, step) for step in steps)
    for other in others:
        first = [held + more for held, more in zip(first, other, strict=True)]
    return first


def held_at(problem: Problem, step: int) -> list[IntArray]:
    """Per node the bytes that each of its strategies holds at a step, if nothing is copied."""
    held = [np.zeros(len(node.costs), np.int64) for node in problem.nodes]
    for index, node in enumerate(problem.nodes):
        for (lo, hi), usages in node.loads:
            if lo <= step < hi:
                held[index] = held[index] + usages
    for network in problem.networks:
        alive = sum(life.base is None and life.made <= step < at_end(life.reads) for life in network.lives)
        if alive and not network.held:
            assert network.sizes is not None
            is_late = all(life.again is None or life.again <= step for life in network.lives)
            if network.again is not None and not is_late:  # held where it is not made again, as it must be at least
                maker, wants = network.again
                least = alive * int(network.sizes[network.makes].min())
                held[maker] = held[maker] + np.where(wants == NOWHERE, least, 0)
                continue
            held[network.producer] = held[network.producer] + alive * network.sizes[network.makes]
    return held


def at_price(problem: Problem, held: Sequence[IntArray], price: float) -> Problem:
    """The problem without memory, in which every byte of `held` (per node and strategy) costs a price."""
    nodes = tuple(
        replace(
            node,
            costs=np.where(node.costs < INFEASIBLE, node.costs + np.rint(price * used).astype(np.int64), INFEASIBLE),
            usages=None,
            interval=(0, 0),
            further_loads=(),
        )
        for node, used in zip(problem.nodes, held, strict=True)
    )
    networks = tuple(replace(each, sizes=None, lives=(), held=False, kept=False) for each in problem.networks)
    return replace(problem, nodes=nodes, networks=networks, usage_limit=None, usage_price=None)
