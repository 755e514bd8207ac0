"""Two plans side by side as one HTML file that opens offline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ...micro_batches import operator_runs
from ..natural_order import starred
from ..plan import ShardingPlan
from ..units import format_bytes, format_gap, format_seconds
from .diff import diff_plans
from .memory_chart import top_bytes
from .report_page import parts_of, rendered, step_bars
from .report_subject import Subject
from .report_values import cost_split

MOST_SHOWN = 15
"""Rows of a table of differences; the rest is added up or counted."""


@dataclass(frozen=True)
class HeadRow:
    """A number of both plans as text, with the exact values.

    ``difference`` and ``ratio`` are of the second plan to the first; empty where one of them does not know it.
    """

    key: str
    name: str
    texts: tuple[str, str]
    exact: tuple[object, object]
    difference: str
    ratio: str


@dataclass(frozen=True)
class ModuleRow:
    """The predicted seconds of a module, those of identical layers together, in both plans."""

    name: str
    compute_s: tuple[float, float]
    communication_s: tuple[float, float]

    @property
    def difference_s(self) -> float:
        """How much longer it takes in the second plan."""
        (first, second) = (self.compute_s[k] + self.communication_s[k] for k in (0, 1))
        return second - first


def comparison_html(
    first: tuple[str, ShardingPlan],
    second: tuple[str, ShardingPlan],
    networks: tuple[Sequence[str], Sequence[str]] = ((), ()),
) -> str:
    """Two plans, each with the name that it is shown by, and sentences on what its mesh runs on."""
    subjects = tuple(Subject.of(name, plan, network) for (name, plan), network in zip((first, second), networks))
    plans = [subject.plan for subject in subjects]
    splits = [(subject.name, cost_split(subject.plan)) for subject in subjects]
    exposures = [subject.exposure for subject in subjects if subject.exposure is not None]
    modules = module_rows(*plans)
    return rendered(
        "comparison.html",
        title=f"{first[0]} against {second[0]}",
        subjects=subjects,
        rows=list(head_rows(*subjects)),
        verdict=_verdict(*subjects),
        diff=diff_plans(*plans),
        bars=step_bars(splits),
        parts=parts_of(splits),
        modules=modules,
        most_shown=MOST_SHOWN,
        longest_ns=max((exposure.simulation.step_ns for exposure in exposures), default=0),
        top_bytes=max(top_bytes(plan) for plan in plans),
    )


def head_rows(first: Subject, second: Subject) -> Iterator[HeadRow]:
    """The numbers of both plans, as far as any of them knows them."""

    def row(
        key: str, name: str, of: Callable[[Subject], float | None], text: Callable[[float], str]
    ) -> Iterator[HeadRow]:
        values = of(first), of(second)
        if values != (None, None):
            texts = tuple("not known" if value is None else text(value) for value in values)
            yield HeadRow(key, name, (texts[0], texts[1]), values, *_compared(*values, text))

    yield from row("step_s", "predicted step", lambda each: each.plan.step_s, format_seconds)
    yield from row("compute_s", "computation", lambda each: each.plan.compute_s, format_seconds)
    yield from row("communication_s", "communication", lambda each: each.plan.communication_s, format_seconds)
    yield from row("optimizer_s", "optimizer", lambda each: each.plan.optimizer_s, format_seconds)
    yield from row(
        "hidden_s",
        "of communication, hidden at best",
        lambda each: None if each.exposure is None else each.exposure.hidden_s,
        format_seconds,
    )
    yield from row("tokens", "tokens/s of all ranks", _tokens_per_s, lambda value: f"{value:,.0f}")
    yield from row("mfu", "MFU", lambda each: each.plan.mfu, lambda value: f"{value:.1%}")
    yield from row("ranks", "ranks", lambda each: each.plan.mesh.size, lambda value: f"{value:,.0f}")
    yield from row(
        "peak_bytes",
        "memory of one rank at its peak",
        lambda each: None if each.plan.memory is None else each.plan.memory.peak.size_bytes,
        lambda value: format_bytes(round(value)),
    )
    yield from row(
        "parameter_bytes_per_rank",
        "parameters of one rank",
        lambda each: each.summary.parameter_bytes_per_rank,
        lambda value: format_bytes(round(value)),
    )
    yield from row("gap", "gap", lambda each: each.plan.solver.gap, format_gap)


def module_rows(first: ShardingPlan, second: ShardingPlan) -> list[ModuleRow]:
    """Every module of the plans, those whose time changes most first."""
    compute, communication = ([_by_module(plan)[k] for plan in (first, second)] for k in (0, 1))
    names = dict.fromkeys(name for sums in (*compute, *communication) for name in sums)
    rows = [
        ModuleRow(
            name,
            (compute[0].get(name, 0.0), compute[1].get(name, 0.0)),
            (communication[0].get(name, 0.0), communication[1].get(name, 0.0)),
        )
        for name in names
    ]
    return sorted(rows, key=lambda row: (-abs(row.difference_s), row.name))


def _by_module(plan: ShardingPlan) -> tuple[dict[str, float], dict[str, float]]:
    """Computation and communication of each module, in seconds."""
    tensors = {entry.name for entry in (*plan.parameters, *plan.buffers)}
    compute: dict[str, list[float]] = defaultdict(list)
    communication: dict[str, list[float]] = defaultdict(list)
    for run in plan.execution:
        module = starred(run.name.partition("/")[0])
        compute[module].append(operator_runs(run.name, plan.micro_batches) * run.predicted_ns / 1e9)
    for entry in plan.redistributions:
        name = entry.tensor.rpartition(".")[0] if entry.tensor in tensors else entry.tensor.partition("/")[0]
        module = starred(name) if "/" in entry.tensor or entry.tensor in tensors else ""
        communication[module].append(plan.runs(entry) * entry.predicted_s)
    sums = [{name: math.fsum(times) for name, times in each.items()} for each in (compute, communication)]
    return sums[0], sums[1]


def _tokens_per_s(subject: Subject) -> float | None:
    return subject.tokens / subject.plan.step_s if subject.tokens and subject.plan.step_s > 0 else None


def _compared(before: float | None, after: float | None, text: Callable[[float], str]) -> tuple[str, str]:
    """The difference with its sign, and the ratio."""
    if before is None or after is None:
        return "", ""
    change = after - before
    sign = "+" if change > 0 else "\N{MINUS SIGN}" if change < 0 else ""
    return f"{sign}{text(abs(change))}" if change else "same", f"{after / before:.3f}" if before > 0 else ""


def _verdict(first: Subject, second: Subject) -> str:
    """Which of the plans is predicted to be faster, in a sentence."""
    if first.plan == second.plan:
        return "The plans are the same."
    if (first.samples, first.plan.fingerprint) != (second.samples, second.plan.fingerprint):
        return "The plans are of different graphs or batches, so their steps do not do the same work."
    before, after = first.plan.step_s, second.plan.step_s
    if before == after or not before > 0 or not after > 0:
        return "Both steps are predicted to take the same time."
    fast, slow = (second, first) if after < before else (first, second)
    less = 1 - fast.plan.step_s / slow.plan.step_s
    return f"The step of {fast.name} is predicted to take {less:.2%} less time than that of {slow.name}."
