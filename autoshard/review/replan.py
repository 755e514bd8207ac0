"""Makes a complete plan of a file that was edited by hand: the edits are kept, everything else is decided again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Unpack

from torch import nn

from ..constraints import Constraint, Constraints, Pin, StrategyPin, gather_constraints, patterns_of
from ..constraints.names import is_meant
from ..planning import Formulation, warn_if_unproven
from ..plans import ShardingPlan
from ..plans.text.line_numbers import line_of_decision
from .decisions import decisions_of
from .edits import Edit, edited_names, find_edits
from .session import Conditions, best_plan, check_model, constraints_of, planner_of, reporter


@dataclass(frozen=True)
class Replanned:
    """A plan made of an edited one.

    Attributes:
        edits: what was changed by hand, kept as pins.
        replaced: pins of the old plan that the edits take the place of.
        plan: the new plan.
        others: how many decisions beside the edited ones are not as they were.
    """

    edits: tuple[Edit, ...]
    replaced: tuple[str, ...]
    plan: ShardingPlan
    others: int


def replan(
    plan: ShardingPlan,
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    text: str = "",
    source: str = "the plan file",
    original: ShardingPlan | None = None,
    **conditions: Unpack[Conditions],
) -> Replanned:
    """Keeps what was changed by hand in a plan and decides the rest again, with the fewest other changes.

    Of the cheapest plans that keep the edits, the one that differs least from the file.

    Args:
        plan: as the edited file says; its redistributions need not fit its layouts any more.
        model, args, kwargs: as for :func:`autoshard.plan`; the model that the plan was made for.
        text, source: the file and its name, so that an error can say in which line an edit stands.
        original: the plan before the edit; by default it is told from what the file records
            (:mod:`autoshard.review.edits`).
        conditions: mesh, hardware, backend, time_limit_s and progress, as in
            :class:`~autoshard.review.session.Conditions`.

    Warns:
        UserWarning: the new plan is not proven optimal.

    Raises:
        PlanMismatchError: the plan is for another model, lists names, shapes or dtypes that the model does not have, or
            what was edited cannot be told.
        ConstraintError: an edit is a layout that its tensor or operator cannot have, or contradicts a pin.
        InfeasibleError: no plan keeps the edits; the message names those that contradict each other.
        BudgetError: no plan that keeps the edits fits the plan's memory budget.
    """
    report = reporter(conditions)
    planner = planner_of(plan, model, args, kwargs, **conditions)
    check_model(plan, planner, text, source)
    report("finding what was edited")
    old = constraints_of(plan)
    before = planner.formulate(old)
    edits = find_edits(plan, planner, before, original)
    kept, replaced = _kept(old, edits, before)
    constraints = _with_edits(kept, edits, plan, text, source)
    report("planning around the edits")
    wanted = decisions_of(plan, before)
    started_s = time.monotonic()
    made = best_plan(planner, constraints, wanted)
    warn_if_unproven(made, planner.time_limit_s, time.monotonic() - started_s)
    edited = edited_names(edits)
    others = sum(
        listed is not None and listed != found and name not in edited
        for name, listed, found in zip(before.names, wanted, decisions_of(made, before))
    )
    return Replanned(edits, replaced, made, others)


def _kept(old: Constraints, edits: Iterable[Edit], before: Formulation) -> tuple[Constraints, tuple[str, ...]]:
    """The constraints of the old plan that stay, and the texts of those that go: pins of nothing but what was edited by
    hand since, where the edit counts.
    """
    edited = edited_names(edits)

    def is_replaced(constraint: Constraint) -> bool:
        held = {name for name in before.names if is_meant(name, before.graph, patterns_of(constraint))}
        return isinstance(constraint, Pin | StrategyPin) and held <= edited

    kept = tuple(constraint for constraint in old.values if not is_replaced(constraint))
    return replace(old, values=kept), tuple(c.text for c in old.values if c not in kept)


def _with_edits(kept: Constraints, edits: Iterable[Edit], plan: ShardingPlan, text: str, source: str) -> Constraints:
    """The constraints and the edits as pins, with the lines where the edits stand."""
    values, places = list(kept.values), dict(kept.places)
    for edit in edits:
        line = line_of_decision(text, edit.names[0]) if text else None
        for constraint in gather_constraints(edit.texts, plan.mesh).values:
            values.append(constraint)
            places[constraint.text] = f"{source}, line {line}" if line else source
    return Constraints(tuple(values), places)
