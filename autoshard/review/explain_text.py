"""An explanation as text for people, and as values for scripts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..plans import ShardingPlan
from ..plans.text.name_patterns import count_repeats, fold, format_pattern
from ..plans.text.notation import format_path
from ..plans.units import format_bytes, format_gap, format_seconds
from ..plans.views.diff import Change, Number, diff_json, diff_plans
from .explain import Explanation

MOST_ROWS = 10
"""Changes of one kind that are listed; the others are counted."""
MOST_NAMES = 3


def explanation_text(found: Explanation) -> str:
    """The answer: what it would cost, what would change elsewhere, and the first collectives that would differ."""
    return "\n".join(_lines(found)) + "\n"


def explanation_json(found: Explanation) -> dict[str, Any]:
    """The answer as JSON-ready values; ``diff`` is that of ``autoshard diff``. Later versions add keys, change none."""
    other = found.alternative
    return {
        "autoshard_explanation": 1,
        "why": found.why,
        "names": list(found.names),
        "present": list(found.present),
        "asked": found.asked,
        "found": list(found.found),
        "repriced": found.repriced,
        "possible": other is not None,
        "reason": found.reason,
        "cost_ns": found.plan.solver.cost_ns,
        "alternative_cost_ns": None if other is None else other.solver.cost_ns,
        "diff": None if other is None else diff_json(diff_plans(found.plan, other)),
    }


def _lines(found: Explanation) -> Iterator[str]:
    many = f" ({len(found.names)})" if len(found.names) > 1 else ""
    yield f"{found.why}{many} is {' and '.join(found.present)}. What if it were {found.asked or 'otherwise'}?"
    yield ""
    if found.alternative is None:
        yield f"Not possible: {found.reason}."
        return
    yield _verdict(found.plan, found.alternative, found)
    if found.repriced:
        yield "Both are priced with the profile of today, not with the one that the plan was made with."
    diff = diff_plans(found.plan, found.alternative)
    yield ""
    yield from _columns([("per rank", "now", "then", "change"), *map(_number, diff.numbers)])
    elsewhere = [change for change in (*diff.placements, *diff.operators) if not _is_asked(change, found)]
    if elsewhere:
        yield ""
        yield "What would change elsewhere"
        yield from _columns([_change(change) for change in elsewhere[:MOST_ROWS]])
        yield from _left(len(elsewhere), "changes")
    moves = list(_moves(found))
    if moves:
        yield ""
        yield "The first collectives that would differ"
        yield from _columns(moves[:MOST_ROWS])
        yield from _left(len(moves), "redistributions")


def _verdict(now: ShardingPlan, then: ShardingPlan, found: Explanation) -> str:
    more, cost = then.solver.cost_ns - now.solver.cost_ns, max(1, now.solver.cost_ns)
    what = "" if found.asked else f" With {' and '.join(found.found)}, the best other placement:"
    if more > 0:
        said = f"A step would take {format_seconds(more / 1e9)} longer ({more / cost:+.2%})."
    elif more < 0:
        said = (
            f"A step would take {format_seconds(-more / 1e9)} less ({more / cost:+.2%}): the plan is not the best one."
        )
    else:
        said = "A step would take as long: both are equally good."
    if then.solver.status != "optimal":
        said += f" This is not proven: the gap is {format_gap(then.solver.gap)}."
    return f"{what} {said}".strip()


def _number(number: Number) -> tuple[str, ...]:
    def form(value: float | None) -> str:
        if value is None:
            return "not known"
        return format_seconds(value) if number.unit == "s" else format_bytes(int(value))

    change = ""
    if number.before is not None and number.after is not None:
        share = (number.after - number.before) / number.before if number.before else 0.0
        change = "same" if number.before == number.after else f"{share:+.1%}" if number.before else "new"
    return number.name, form(number.before), form(number.after), change


def _is_asked(change: Change, found: Explanation) -> bool:
    """Whether a change is of exactly the tensors that were asked about."""
    return change.count == len(found.names) and set(change.patterns) <= {*found.names, found.why}


def _change(change: Change) -> tuple[str, ...]:
    names = ", ".join(change.patterns[:MOST_NAMES])
    more = len(change.patterns) - MOST_NAMES
    return f"{names}{f' and {more} more' if more > 0 else ''}", f"{change.before}  =>  {change.after}"


def _moves(found: Explanation) -> Iterator[tuple[str, ...]]:
    """Redistributions that only one of the two plans has, in the order of the step; identical layers are one entry."""
    assert found.alternative is not None
    place = {name: i for i, name in enumerate(found.order)}
    was, then = (_keyed(plan) for plan in (found.plan, found.alternative))
    repeats = count_repeats(key[0] for key in (*was, *then))
    rows = []
    for sign, these, others in (("-", was, then), ("+", then, was)):
        lines = fold([(key[0], (*key[1:], these[key])) for key in these if key not in others])
        for line in lines:
            phase, path, steps, seconds = line.value
            first = min(place.get(name.partition(":")[0], len(place)) for name in line.pattern.names())
            many = f" x{line.pattern.count}" if line.pattern.count > 1 else ""
            row = (
                f"{sign} {phase}",
                format_pattern(line.pattern, repeats),
                f"{steps}{many}",
                format_seconds(seconds),
                path,
            )
            rows.append(((phase != "forward", first, sign == "+", path), row))
    yield from (row for _, row in sorted(rows))


def _keyed(plan: ShardingPlan) -> dict[tuple[str, str, str, str], float]:
    """Redistributions that communicate, by tensor, phase, path and steps."""
    return {
        (
            entry.tensor,
            entry.phase,
            format_path(entry.path, plan.mesh),
            ", ".join(f"{c.kind} {c.axis} {format_bytes(c.size_bytes)}" for c in entry.collectives),
        ): entry.predicted_s
        for entry in plan.redistributions
        if entry.collectives
    }


def _left(count: int, noun: str) -> Iterator[str]:
    if count > MOST_ROWS:
        yield f"  and {count - MOST_ROWS} more {noun}; --format json lists all"


def _columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))] if rows else []
    for row in rows:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths))).rstrip()
