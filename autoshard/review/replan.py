"""Makes a complete plan of a file that was edited by hand: the edits are kept, everything else is decided again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Unpack

from torch import nn

from ..constraints import (
    Constraint,
    Constraints,
    Exclusion,
    Pin,
    PlacementRule,
    StrategyPin,
    gather_constraints,
    patterns_of,
)
from ..constraints.names import is_meant
from ..planning import Formulation, Planner, warn_if_unproven
from ..plans import ShardingPlan
from ..plans.text.line_numbers import line_of_decision
from .decisions import choices_of, decisions_of
from .edits import Edit, UntoldEdits, decisions_before, edited_names, find_edits
from .session import Conditions, best_plan, check_model, constraints_of, planner_of, reporter


@dataclass(frozen=True)
class Replanned:
    """A plan made of an edited one.

    Attributes:
        edits: what was changed by hand, kept as pins.
        added: constraints that were added to the pins of the file, as far as the plan before did not keep to them.
        replaced: pins of the old plan that the edits take the place of.
        plan: the new plan.
        others: how many decisions beside the edited ones are not as they were.
    """

    edits: tuple[Edit, ...]
    added: tuple[str, ...]
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
    edits, added = _edited(plan, planner, old, before, original)
    kept, replaced = _kept(old, edits, added, before)
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
    return Replanned(edits, added, replaced, made, others)


def _edited(
    plan: ShardingPlan, planner: Planner, old: Constraints, before: Formulation, original: ShardingPlan | None
) -> tuple[tuple[Edit, ...], tuple[str, ...]]:
    """The layouts that were edited, and the texts of the constraints that were added. Where the record fits no
    decisions under all of them, it is read without those that say where something lies; those that it breaks are new.
    """
    try:
        return find_edits(plan, decisions_before(plan, planner, before, original), before), _added(old, original)
    except UntoldEdits:
        others = tuple(c for c in old.values if not isinstance(c, Pin | StrategyPin | Exclusion | PlacementRule))
        if others == old.values:
            raise
        free = planner.formulate(replace(old, values=others))
    found = decisions_before(plan, planner, free, None)
    choices = choices_of(found, before)
    broken = {name for name, made, choice in zip(before.names, found, choices) if made is not None and choice is None}
    added = (c.text for c in old.values if c not in others and not broken.isdisjoint(_held(c, before)))
    return find_edits(plan, found, free), tuple(added)


def _added(old: Constraints, original: ShardingPlan | None) -> tuple[str, ...]:
    known = old.texts if original is None else constraints_of(original).texts
    return tuple(text for text in old.texts if text not in known)


def _held(constraint: Constraint, before: Formulation) -> set[str]:
    """The names that a constraint is about."""
    return {name for name in before.names if is_meant(name, before.graph, patterns_of(constraint))}


def _kept(
    old: Constraints, edits: Iterable[Edit], added: Iterable[str], before: Formulation
) -> tuple[Constraints, tuple[str, ...]]:
    """The constraints of the old plan that stay, and the texts of those that go: pins of nothing but what was edited by
    hand since, where the edit counts. What was added by hand stays.
    """
    edited = edited_names(edits)

    def is_replaced(constraint: Constraint) -> bool:
        is_old_pin = isinstance(constraint, Pin | StrategyPin) and constraint.text not in added
        return is_old_pin and _held(constraint, before) <= edited

    kept = tuple(constraint for constraint in old.values if not is_replaced(constraint))
    return replace(old, values=kept), tuple(c.text for c in old.values if c not in kept)


def _with_edits(kept: Constraints, edits: Iterable[Edit], plan: ShardingPlan, text: str, source: str) -> Constraints:
    """The constraints and the edits as pins, with the lines where the edits stand."""
    values, places = list(kept.values), dict(kept.places)
    for edit in edits:
        line = line_of_decision(text, edit.names[0]) if text else None
        for constraint in gather_constraints(edit.texts, plan.mesh).values:
            if constraint.text not in kept.texts:
                values.append(constraint)
            places[constraint.text] = f"{source}, line {line}" if line else source
    return Constraints(tuple(values), places)
