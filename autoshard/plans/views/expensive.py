"""The redistributions of a plan by what they cost, those of identical layers together, the dearest first."""

from __future__ import annotations

from dataclasses import dataclass

from ...micro_batches import redistribution_runs
from ..plan import Redistribution, ShardingPlan
from ..text.folded_plan import FoldedPlan
from ..text.name_patterns import Line

MOST_EXPENSIVE = 10
"""How many are shown where not all are."""


@dataclass(frozen=True)
class Expense:
    """A line of redistributions: one tensor's, or that of all identical layers; they run ``count`` times in a step."""

    line: Line[Redistribution]
    count: int

    @property
    def predicted_s(self) -> float:
        """What all of them take in a step."""
        return self.count * self.line.value.predicted_s


def expense(plan: ShardingPlan, line: Line[Redistribution]) -> Expense:
    """What a line of a plan costs."""
    runs = redistribution_runs(line.pattern.names()[0], line.value.consumers, plan.micro_batches)
    return Expense(line, runs * line.pattern.count)


def by_expense(plan: ShardingPlan, folded: FoldedPlan) -> list[Expense]:
    """All of a plan, the dearest first."""
    expenses = [expense(plan, line) for line in folded.redistributions]
    return sorted(expenses, key=lambda each: -each.predicted_s)
