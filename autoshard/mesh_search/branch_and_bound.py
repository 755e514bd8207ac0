"""Best-first search: of many entrants, whose answers take long, the cheapest answer with as few answers as possible.

An entrant has a bound: its answer costs at least that. Those of the lowest bounds are asked for their answers, a few at
once, which may then be worked out side by side; once the lowest bound is no lower than the best answer, all that are
left are cut. Who is asked depends on bounds and answers alone, not on how fast the answers come.

References: A. Land, A. Doig, "An automatic method of solving discrete programming problems", Econometrica 28(3), 1960.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Answered = TypeVar("Answered")


class Entrant(Protocol):
    """Somebody whose answer costs at least ``bound``."""

    @property
    def bound(self) -> float:
        """Its answer costs no less."""


Entered = TypeVar("Entered", bound=Entrant)


@dataclass(frozen=True)
class Answer(Generic[Answered]):
    """What an entrant came to; ``cost`` is infinite where it has no answer."""

    value: Answered
    cost: float


@dataclass(frozen=True)
class Cut(Generic[Entered]):
    """An entrant whose answer costs no less than one that is known."""

    entrant: Entered


def best_first(
    entrants: Iterable[Entered],
    ask: Callable[[Sequence[Entered]], Iterable[Answer[Answered]]],
    at_once: int,
    best: float = float("inf"),
) -> Iterator[Answer[Answered] | Cut[Entered]]:
    """The answers, as they come, then those that were cut.

    Args:
        ask: the answers of some entrants, in their order.
        at_once: how many it is given at most.
        best: the cost of an answer that is known already.
    """
    waiting = sorted(entrants, key=lambda entrant: entrant.bound)
    while chosen := [entrant for entrant in waiting[:at_once] if entrant.bound < best]:
        waiting = waiting[len(chosen) :]
        for found in ask(chosen):
            best = min(best, found.cost)
            yield found
    yield from map(Cut, waiting)
