"""Best-first search gives the least answer, and cuts nobody who could have won."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from autoshard.mesh_search.branch_and_bound import Answer, Cut, best_first


@dataclass(frozen=True)
class Known:
    """An entrant whose bounds and cost are known; notes that it was asked for its answer."""

    bounds: tuple[float, ...]
    cost: float
    asked: list[float] = field(compare=False)

    @property
    def bound(self) -> float:
        return self.bounds[0]

    def next_stage(self) -> Known | Answer[float]:
        if len(self.bounds) > 1:
            return Known(self.bounds[1:], self.cost, self.asked)
        self.asked.append(self.cost)
        return Answer(self.cost, self.cost)


@pytest.mark.parametrize("seed", range(20))
def test_the_least_answer_is_found_and_only_those_that_could_have_won_are_asked(seed: int) -> None:
    numbers = random.Random(seed)
    costs = [numbers.choice([float("inf"), float(numbers.randint(50, 100))]) for _ in range(6)]
    asked: list[float] = []
    bounds = [sorted(numbers.uniform(0, min(cost, 120)) for _ in range(2)) for cost in costs]
    known = numbers.choice([float("inf"), 60.0])
    entrants = [Known((0.0, *each), cost, asked) for each, cost in zip(bounds, costs)]
    found = list(best_first(entrants, known))
    answers = [each.cost for each in found if isinstance(each, Answer)]
    least = min(*costs, known)
    assert min(*answers, known) == least if answers else least == known
    assert len(found) == len(costs) and all(each.entrant.bound >= least for each in found if isinstance(each, Cut))
    assert len(asked) == len(answers) == sum(each[-1] < least for each in bounds)
