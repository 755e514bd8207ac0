"""Best-first search: of many entrants, whose answers take long, the cheapest answer with as few answers as possible.

An entrant has a bound: its answer costs at least that. The entrant of the lowest bound takes its next stage, which
gives a higher bound or its answer; once the lowest bound is no lower than the best answer, all that are left are cut.

References: A. Land, A. Doig, "An automatic method of solving discrete programming problems", Econometrica 28(3), 1960.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Answered = TypeVar("Answered", covariant=True)


class Entrant(Protocol[Answered]):
    """Somebody whose answer costs at least ``bound``."""

    @property
    def bound(self) -> float:
        """Its answer costs no less."""

    def next_stage(self) -> Entrant[Answered] | Answer[Answered]:
        """The same with a better bound, or its answer."""


@dataclass(frozen=True)
class Answer(Generic[Answered]):
    """What an entrant came to; ``cost`` is infinite where it has no answer."""

    value: Answered
    cost: float


@dataclass(frozen=True)
class Cut(Generic[Answered]):
    """An entrant whose answer costs no less than one that is known."""

    entrant: Entrant[Answered]


def best_first(
    entrants: Iterable[Entrant[Answered]], best: float = float("inf")
) -> Iterator[Answer[Answered] | Cut[Answered]]:
    """The answers, as they come, then those that were cut.

    Args:
        best: the cost of an answer that is known already.
    """
    waiting = [(entrant.bound, number, entrant) for number, entrant in enumerate(entrants)]
    heapq.heapify(waiting)
    while waiting:
        bound, number, entrant = heapq.heappop(waiting)
        if bound >= best:
            yield Cut(entrant)
            continue
        found = entrant.next_stage()
        if isinstance(found, Answer):
            best = min(best, found.cost)
            yield found
        else:
            heapq.heappush(waiting, (max(bound, found.bound), number, found))
