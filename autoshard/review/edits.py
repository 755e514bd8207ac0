"""Finds out which decisions of a plan file were changed by hand.

A file says more than its decisions: it records which redistributions the original decisions needed, for whom, and how
long each operator took. Whoever edits a layout leaves these as they were. The original is therefore the assignment
that agrees with all that is recorded and differs from the decisions in the file in as few places as possible: a small
problem for the same solver. Where the record does not settle it, the original file must be given.
"""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..constraints.names import is_meant
from ..errors import PlanMismatchError
from ..layout import Layout, format_layout
from ..planning import Formulation, Planner, solve
from ..plans import Redistribution, ShardingPlan
from ..plans.text.name_patterns import count_repeats, fold, format_pattern
from ..strategies import Strategy
from .decisions import Decisions, choices_of, decision_text, decisions_made, decisions_of
from .file_evidence import FileEvidence
from .session import routes_of, solution_of

GIVE_THE_ORIGINAL = (
    "give the file as it was before the edit as original (for example `git show HEAD:plan.yaml > old.yaml`, then "
    "--original old.yaml)"
)


class UntoldEdits(PlanMismatchError):
    """The plan before the edit cannot be told from what the file records."""


@dataclass(frozen=True)
class Edit:
    """Decisions that were changed by hand in the same way: what they were, what they are now, and pins that keep them.

    ``pattern`` names them for people, ``names`` are all of them; ``texts`` are constraints, as in
    :mod:`autoshard.constraints`.
    """

    pattern: str
    names: tuple[str, ...]
    before: str
    after: str
    texts: tuple[str, ...]


def decisions_before(
    plan: ShardingPlan, planner: Planner, formulation: Formulation, original: ShardingPlan | None
) -> Decisions:
    """What a file decided before it was edited.

    Args:
        plan: as the file says now.
        formulation: under the constraints of the file, priced by the profile that it was made with.
        original: the plan before the edit, where it is at hand.

    Raises:
        UntoldEdits: it cannot be told from the record.
        PlanMismatchError: the record is of other prices, or the original given is for another model or mesh.
    """
    if original is None:
        return _reconstructed(plan, planner, formulation, decisions_of(plan, formulation))
    if (original.fingerprint, original.mesh) != (plan.fingerprint, plan.mesh):
        raise PlanMismatchError("the original is a plan for another model or mesh than the edited file")
    return decisions_of(original, formulation)


def find_edits(plan: ShardingPlan, before: Decisions, formulation: Formulation) -> tuple[Edit, ...]:
    """The edits of a file, given what it decided before."""
    found = decisions_of(plan, formulation)
    changed = [
        (name, (old, new)) for name, old, new in zip(formulation.names, before, found) if old and new and old != new
    ]
    return tuple(_edits(changed, formulation))


def _reconstructed(plan: ShardingPlan, planner: Planner, formulation: Formulation, found: Decisions) -> Decisions:
    if planner.profile.fingerprint != plan.hardware_fingerprint:
        raise PlanMismatchError(
            f"the profile {planner.profile.name} is not the one that the plan was priced with, so what was edited "
            f"cannot be told from the times in the file; {GIVE_THE_ORIGINAL}"
        )
    problem = FileEvidence(plan, formulation).problem(choices_of(found, formulation))
    choices = solve(problem, backend=planner.backend, time_limit_s=planner.time_limit_s).choices
    if choices is not None:
        solution = solution_of(formulation, choices, routes_of(plan, formulation))
        if solution is not None and _record(planner.write(formulation, solution)) == _record(plan):
            return decisions_made(formulation, choices)
    raise UntoldEdits(
        "what was edited cannot be told from the file: its redistributions and times fit no decisions near those that "
        "it lists. Redistributions follow from the layouts and are not edited, and schemes (`family`, `baseline`) that "
        f"were added to `pins` are given to `autoshard plan --constraint`; otherwise {GIVE_THE_ORIGINAL}"
    )


def _record(plan: ShardingPlan) -> object:
    """What a file records beside its decisions; sums are left out, since they are rounded."""
    return [_moved(entry) for entry in plan.redistributions], plan.execution


def _moved(entry: Redistribution) -> object:
    return entry.tensor, entry.phase, entry.path, entry.consumers, entry.kept, entry.shared


def _edits(changed: list[tuple[str, tuple[Strategy, Strategy]]], formulation: Formulation) -> Iterator[Edit]:
    """The changes, those that are alike as one :class:`Edit`, with the constraints that keep them."""
    known = [name for name in formulation.names if name]
    repeats = count_repeats(known)
    for line in fold(changed):
        before, after = line.value
        names, pattern = tuple(line.pattern.names()), format_pattern(line.pattern, repeats)
        said = _constraint(before, after, formulation)
        matched = {name for name in known if is_meant(name, formulation.graph, [pattern])}
        globs = (pattern,) if matched == set(names) else tuple(map(glob.escape, names))
        yield Edit(
            pattern,
            names,
            decision_text(before, formulation),
            decision_text(after, formulation),
            tuple(f"{one}={said}" for one in globs),
        )


def _constraint(before: Strategy, after: Strategy, formulation: Formulation) -> str:
    """The constraint that keeps the layouts that were changed by hand; layouts of the same line that were not changed
    stay free.
    """
    first = after.outputs[0] if after.outputs else None
    if before.inputs == after.inputs and before.outputs[1:] == after.outputs[1:] and first is not None:
        return format_layout(first, formulation.mesh)
    inputs, outputs = (
        ", ".join(_held(old, new, formulation) for old, new in zip(olds, news))
        for olds, news in ((before.inputs, after.inputs), (before.outputs, after.outputs))
    )
    return f"{inputs} -> {outputs}"


def _held(old: Layout | None, new: Layout | None, formulation: Formulation) -> str:
    return "*" if new is None or old == new else format_layout(new, formulation.mesh)


def edited_names(edits: Iterable[Edit]) -> frozenset[str]:
    """The names of all decisions that were changed by hand."""
    return frozenset(name for edit in edits for name in edit.names)
