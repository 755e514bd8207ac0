"""Checks and new plans as text for people, and as values for scripts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..plans import ShardingPlan
from ..plans.units import format_seconds
from .check import Review
from .replan import Replanned


def review_text(review: Review, name: str) -> str:
    """One line for each finding, then the verdict."""
    lines = []
    for finding in review.findings:
        lines.append(f"{'ok  ' if finding.fits else 'FAIL'}  {finding.part:<11} {finding.said}")
        lines += [f"        {detail}" for detail in finding.details]
    lines.append(f"{name} is {'good' if review.fits else 'not good any more'}")
    return "\n".join(lines) + "\n"


def review_json(review: Review) -> dict[str, Any]:
    """The findings as JSON-ready values. Later versions add keys and change none."""
    return {
        "autoshard_check": 1,
        "fits": review.fits,
        **{key: value for key, value in asdict(review).items() if key != "findings"},
        "distance": review.distance,
        "findings": [asdict(finding) | {"details": list(finding.details)} for finding in review.findings],
    }


def replanned_text(made: Replanned, old: ShardingPlan) -> str:
    """What was kept, and what it cost."""
    return "\n".join(_replanned(made, old)) + "\n"


def replanned_json(made: Replanned, old: ShardingPlan) -> dict[str, Any]:
    """The edits and what came of them as JSON-ready values. Later versions add keys and change none."""
    return {
        "autoshard_replan": 1,
        "edits": [asdict(edit) | {"names": list(edit.names), "texts": list(edit.texts)} for edit in made.edits],
        "added": list(made.added),
        "replaced": list(made.replaced),
        "others": made.others,
        "cost_ns": old.solver.cost_ns,
        "new_cost_ns": made.plan.solver.cost_ns,
        "status": made.plan.solver.status,
    }


def _replanned(made: Replanned, old: ShardingPlan) -> Iterator[str]:
    if made.edits:
        yield f"kept {_count(len(made.edits), 'edit')} as pins"
    elif not made.added and made.others:
        yield "found no edit: other decisions are better under the pins and the prices of now"
    elif not made.added:
        yield "found no edit: the decisions are those that the file was made with"
    for edit in made.edits:
        many = f" ({len(edit.names)})" if len(edit.names) > 1 else ""
        yield f"  {edit.pattern}{many}: {edit.before}  =>  {edit.after}"
    for text in made.added:
        yield f"kept the added pin {text}"
    for text in made.replaced:
        yield f"  in the place of the pin {text}"
    yield f"changed {_count(made.others, 'other decision')}"
    before, after = old.solver.cost_ns, made.plan.solver.cost_ns
    share = (after - before) / max(1, before)
    yield f"predicted step {format_seconds(before / 1e9)} => {format_seconds(after / 1e9)} ({share:+.2%})"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
