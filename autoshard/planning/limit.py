"""What a rank may hold: the budget that a user gives, and what of it may be in use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from cost_models import OptimizerPolicy, Profile, optimizer_policy

from ..errors import BudgetError
from ..plans import MemoryOutcome
from ..plans.memory_outcome import allowed_bytes
from ..plans.units import parse_bytes
from .timeline import Timeline, outcome


@dataclass(frozen=True)
class MemoryLimit:
    """What a rank may hold, and whose state counts.

    Attributes:
        optimizer: the name of a policy (:mod:`cost_models.optimizers`).
        budget_bytes: what the device may count; None for no limit.
        soft_ms_per_gib: makes the limit soft: one GiB in use above what it allows costs as much as this many
            milliseconds of step time.
        allocator_margin: what the allocator reserves beyond what is in use, as a share of that.
    """

    optimizer: str = "adamw"
    budget_bytes: int | None = None
    soft_ms_per_gib: float | None = None
    allocator_margin: float = 0.0

    @property
    def allowed_bytes(self) -> int | None:
        """What may be in use at a time; None for no limit."""
        return None if self.budget_bytes is None else allowed_bytes(self.budget_bytes, self.allocator_margin)

    def outcome(self, found: Timeline) -> MemoryOutcome:
        """A timeline as a plan says it, with this limit."""
        return outcome(found, self.optimizer, self.budget_bytes, self.soft_ms_per_gib, self.allocator_margin)

    @property
    def policy(self) -> OptimizerPolicy:
        """The policy of the optimizer."""
        return optimizer_policy(self.optimizer)


def memory_limit(
    optimizer: str, memory: str | int | None, soft_ms_per_gib: float | None, profile: Profile
) -> MemoryLimit:
    """The limit that a user means.

    Raises:
        BudgetError: the budget is no size, not above zero, or missing where it is to be soft; the price is no number
            from 0 up; or the optimizer policy is unknown.
    """
    try:
        optimizer_policy(optimizer)
        budget = int(profile.memory_bytes) if memory == "profile" else memory
        budget = parse_bytes(budget) if isinstance(budget, str) else budget
    except ValueError as error:
        raise BudgetError(str(error)) from None
    if budget is not None and budget <= 0:
        raise BudgetError(f"the memory budget is {memory}; give a size above zero, for example 80GiB")
    if soft_ms_per_gib is not None:
        if budget is None:
            raise BudgetError("a soft memory limit needs a budget; give one, for example 80GiB")
        if not (0 <= soft_ms_per_gib < math.inf):
            raise BudgetError(f"{soft_ms_per_gib} is no price; give milliseconds per GiB above the budget, from 0 up")
    return MemoryLimit(optimizer, budget, soft_ms_per_gib, profile.allocator_margin)
