"""What any assignment uses at least: where that is over the limit, no backend has to find out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain

from .evaluate import added_up
from .networks import NOWHERE, Life, Network
from .problem import Problem

Held = tuple[int, int, int]
"""From a step on, up to another, at least so many bytes."""


def least_usage(problem: Problem) -> int:
    """Bytes that every assignment uses at some time step, at least: each load as small as any strategy has it, and of
    each tensor with copies the smallest one, for as long as there must be one.
    """
    loads = ((lo, hi, int(usages.min())) for node in problem.nodes for (lo, hi), usages in node.loads)
    return max((usage for _, usage in added_up(chain(loads, _copies(problem)))), default=0)


def is_out_of_reach(problem: Problem) -> bool:
    """Whether every assignment is over the usage limit."""
    limited = problem.usage_limit is not None and problem.usage_price is None
    return limited and least_usage(problem) > (problem.usage_limit or 0)


def _copies(problem: Problem) -> Iterator[Held]:
    """What the copies of each tensor hold at least: from the step at which it is made to the end of its last read there
    is one always, as each is taken from one that is there. A view has none of its own: what it is a view of is there.
    """
    smallest = [0 if network.sizes is None else int(network.sizes.min()) for network in problem.networks]
    alive = [
        (life.made, index, number)
        for index, network in enumerate(problem.networks)
        for number, life in enumerate(network.lives)
    ]
    views: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # until when, and how many bytes
    for made, index, number in sorted(alive, reverse=True):  # a view before what it is a view of
        network, own = problem.networks[index], smallest[index]
        life = network.lives[number]
        ends = [(_last_read(network, life), own)]
        ends += [(end, min(size, own)) for end, size in views[index, number]]
        if life.base is not None:
            if life.base.consumer < _needed(problem.networks[life.base.network]):
                views[life.base[:2]] += ends
        elif not network.held:
            yield from _staircase(made, ends)


def _last_read(network: Network, life: Life) -> int:
    """Until when a copy of what the producer made must be there: to the end of the reads that every strategy does."""
    consumers = network.consumers[: _needed(network)]
    needed = [until for (_, until), (_, wants) in zip(life.reads, consumers) if (wants != NOWHERE).all()]
    return max(needed, default=life.made + 1)


def _needed(network: Network) -> int:
    """How many of its consumers read what the producer made, and never what is made again."""
    return len(network.consumers if network.again is None else network.forward)


def _staircase(since: int, ends: list[tuple[int, int]]) -> Iterator[Held]:
    """The most bytes of those that are held up to each of the ends."""
    for end, _ in sorted(set(ends)):
        if end > since:
            yield since, end, max(size for until, size in ends if until >= end)
            since = end
