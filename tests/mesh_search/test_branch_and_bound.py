"""Best-first search gives the least answer, and cuts nobody who could have won."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from autoshard.mesh_search.branch_and_bound import Answer, Cut, best_first


@dataclass(frozen=True)
class Known:
    """An entrant whose bound and cost are known."""

    bound: float
    cost: float


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_the_least_answer_is_found_and_only_those_that_could_have_won_are_asked(seed: int, at_once: int) -> None:
    numbers = random.Random(seed)
    costs = [numbers.choice([float("inf"), float(numbers.randint(50, 100))]) for _ in range(6)]
    entrants = [Known(numbers.uniform(0, min(cost, 120)), cost) for cost in costs]
    known = numbers.choice([float("inf"), 60.0])
    rounds: list[list[Known]] = []

    def ask(chosen: Sequence[Known]) -> Iterator[Answer[Known]]:
        rounds.append(list(chosen))
        yield from (Answer(each, each.cost) for each in chosen)

    found = list(best_first(entrants, ask, at_once, known))
    answers = [each.value for each in found if isinstance(each, Answer)]
    cut = [each.entrant for each in found if isinstance(each, Cut)]
    least = min(*costs, known)
    assert sorted([*answers, *cut], key=entrants.index) == entrants
    assert min([each.cost for each in answers], default=known) == least or least == known
    assert all(each.bound >= least for each in cut)
    best = known
    for chosen in rounds:
        assert 1 <= len(chosen) <= at_once and all(each.bound < best for each in chosen)
        best = min(best, *(each.cost for each in chosen))
