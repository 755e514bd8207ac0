"""A plan as tables that a person reads: rich on a terminal, plain text of full width elsewhere.

Not exported by :mod:`autoshard.plans`: reading a plan in a training job does not load rich.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from typing import TextIO

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ...layout import format_layout
from ...mesh import Mesh
from ..memory_outcome import MemoryOutcome
from ..plan import ShardingPlan, TensorEntry
from ..text.folded_plan import FoldedPlan, fold_plan
from ..text.layout_preserving import preserves_layout
from ..text.name_patterns import Line, Repeats, format_pattern
from ..text.notation import format_path, format_strategy
from ..units import format_bytes, format_seconds
from .axis_use import NOT_MODELLED, WARNING, network_lines, use_lines
from .expensive import MOST_EXPENSIVE, by_expense
from .expert_words import expert_lines
from .redistribution_reasons import RedistributionReasons, what_runs
from .report_values import tenant_words
from .summary import AgainTotal, PlanSummary, summarize

PIPE_COLUMNS = 4000
"""Width for what is not a terminal: wide enough that no line is folded; tables take only what they need."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves it to the caller what a reader that has gone means; rich would end with exit code 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def console_for(stream: TextIO) -> Console:
    """A console that colours and folds on a terminal, and writes whole plain lines anywhere else."""
    if stream.isatty():
        return _Console(file=stream)
    return _Console(file=stream, width=PIPE_COLUMNS, force_terminal=False, color_system=None, legacy_windows=False)


def show_text(plan: ShardingPlan, console: Console) -> None:
    """Prints the header, parameters, operators, collectives, what is computed again, memory, and the most expensive
    redistributions.
    """
    summary, folded = summarize(plan), fold_plan(plan)
    console.print(_header(summary, plan, console.is_terminal))
    for title, tensors in (
        ("Parameters", folded.parameters),
        ("Buffers", folded.buffers),
        ("Inputs", folded.inputs),
        ("Outputs", folded.outputs),
    ):
        if tensors:
            _print(title, _tensors(tensors, plan.mesh, folded.repeats), console)
    _print_operators(folded, plan.mesh, console)
    if summary.collectives:
        _print("Collectives of one rank in a step", _collectives(summary), console)
    if summary.recomputed:
        _print("Computed again in the backward", _again(summary), console)
    if summary.held:
        _print(f"Held over a step of {summary.micro_batches} micro-batches", _held(summary), console)
    if summary.memory is not None:
        _print("Memory of one rank at its fullest", _memory(plan, summary.memory), console)
    if folded.redistributions:
        _print("Most expensive redistributions", _redistributions(plan, folded), console)


def headline(summary: PlanSummary) -> tuple[str, ...]:
    """The lines that say what a plan is worth, the last one on memory where the plan knows it."""
    per_rank = format_bytes(summary.parameter_bytes_per_rank)
    return (
        f"{summary.verdict}: cost {summary.cost_ns} ns, bound {summary.bound_ns} ns, gap {summary.gap:.3%}",
        f"predicted step {format_seconds(summary.step_s)}: compute {format_seconds(summary.compute_s)}, "
        f"communication {format_seconds(summary.communication_s)}, {_optimizer_words(summary)}",
        f"parameters {format_bytes(summary.parameter_bytes)}, {per_rank} on the rank with the largest shards",
        *([_precision_line(summary)] if (summary.param_dtype, summary.reduce_dtype) != (None, None) else []),
        *([_micro_batches_line(summary)] if summary.micro_batches > 1 else []),
        *([_schedule_line(summary)] if summary.schedule.planned or summary.schedule.early else []),
        *([_again_line(summary)] if summary.recomputed else []),
        *([] if summary.memory is None else [_memory_line(summary.memory)]),
    )


def plan_lines(plan: ShardingPlan) -> tuple[str, ...]:
    """What ``plan`` and ``show`` say of a plan: what it is worth, what its axes run on and are for, how far it is from
    what experts plan, the constraints in force, and what is in none of its times.
    """
    return (
        *headline(summarize(plan)),
        *network_lines(plan),
        *use_lines(plan),
        *expert_lines(plan),
        *(f"pin {pin}" for pin in plan.pins),
        f"not in these times: {NOT_MODELLED}",
    )


def _optimizer_words(summary: PlanSummary) -> str:
    if summary.optimizer_s is None:
        return "optimizer not known"
    return f"optimizer {format_seconds(summary.optimizer_s)}"


def _schedule_line(summary: PlanSummary) -> str:
    total = summary.schedule
    costs = f"which cost {summary.contention:.0%} of that: the step takes {format_seconds(summary.overlapped_s)}"
    early = f"; {total.early} for activations set out early" if total.early else ""
    return (
        f"schedule: {total.planned} collectives for parameters run as {total.run}, in buckets of "
        f"{format_bytes(total.bucket_bytes)}{'' if total.gathers_ahead else ', none gathered ahead'}{early}; at best "
        f"{format_seconds(total.hidden_s)} of the step hide{f', {costs}' * (summary.contention < 1)}"
    )


def _again_line(summary: PlanSummary) -> str:
    total = AgainTotal.together("all", summary.recomputed)
    time = format_seconds(total.predicted_s)
    saved = f", which need not keep {format_bytes(total.saved_bytes)}" if total.saved_bytes else ""
    return f"computed again in the backward: {total.count} operators of the forward, {time}{saved}"


def _precision_line(summary: PlanSummary) -> str:
    return (
        f"precision: a step computes with parameters as {summary.param_dtype or 'they are'}"
        f"{f', and reduces gradients as {summary.reduce_dtype}' * (summary.reduce_dtype is not None)}"
    )


def _micro_batches_line(summary: PlanSummary) -> str:
    copies, sums = (_held_words(summary, *each) for each in (("copy", "copies"), ("sum", "sums")))
    return f"a step of {summary.micro_batches} micro-batches: holds {copies} beside parameters, {sums} for gradients"


def _held_words(summary: PlanSummary, what: str, words: str) -> str:
    """``12 copies of 1.50 MiB``: those that lie otherwise than the parameter does."""
    totals = [total for total in summary.held if total.what == what]
    if not totals:
        return f"no {words}"
    return f"{sum(t.count for t in totals)} {words} of {format_bytes(sum(t.size_bytes for t in totals))}"


def _memory_line(memory: MemoryOutcome) -> str:
    peak = memory.peak
    limit = "no budget" if memory.budget_bytes is None else f"budget {format_bytes(memory.budget_bytes)}"
    if memory.soft_ms_per_gib is not None:
        limit += f", {memory.soft_ms_per_gib:g} ms per GiB above it"
    return (
        f"memory per rank {memory.peak_words} ({limit}), fullest in the {peak.phase} at {peak.operator}; "
        f"{memory.static_words} {format_bytes(memory.static_bytes)}"
    )


def _header(summary: PlanSummary, plan: ShardingPlan, boxed: bool) -> Panel | Text:
    """What the plan is and is worth; elsewhere than on a terminal, where lines do not fold, a box would be too wide."""
    text = Text(
        f"mesh {summary.mesh} ({summary.ranks} ranks), hardware {summary.hardware}, objective {summary.objective}"
    )
    for line in plan_lines(plan):
        text.append(f"\n{line}", style="bold red" if line.startswith(WARNING) else "")
    if not boxed:
        return Text(f"{summary.model}\n").append_text(text)
    return Panel.fit(text, title=Text(summary.model), title_align="left")


def _print(title: str, table: Table, console: Console) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    console.print(table)


def _table(columns: Iterable[str], numbers: Iterable[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for column in numbers:
        table.add_column(column, overflow="fold", justify="right")
    return table


def _add(table: Table, *cells: object) -> None:
    """A row of plain text: names may hold brackets, which are no markup."""
    table.add_row(*(Text(str(cell)) for cell in cells))


def _tensors(lines: Iterable[Line[TensorEntry]], mesh: Mesh, repeats: Repeats) -> Table:
    table = _table(("name", "layout", "shape", "dtype"), ("count",))
    for line in lines:
        layout, shape = format_layout(line.value.layout, mesh), list(line.value.shape)
        _add(table, format_pattern(line.pattern, repeats), layout, shape, line.value.dtype, line.pattern.count)
    return table


def _again(summary: PlanSummary) -> Table:
    table = _table(("operator",), ("count", "time", "saves"))
    shown, left = summary.recomputed[:MOST_EXPENSIVE], summary.recomputed[MOST_EXPENSIVE:]
    for total in (*shown, *([AgainTotal.together("others", left)] if left else [])):
        saves = format_bytes(total.saved_bytes) if total.saved_bytes else ""
        _add(table, total.name, total.count, format_seconds(total.predicted_s), saves)
    return table


def _held(summary: PlanSummary) -> Table:
    table = _table(("parameter", "what", "held as", "stored as"), ("count", "bytes"))
    for total in summary.held:
        what = {"copy": "copy, made once", "sum": "sum of gradients, reduced once"}[total.what]
        _add(table, total.name, what, total.layout, total.stored, total.count, format_bytes(total.size_bytes))
    return table


def _print_operators(folded: FoldedPlan, mesh: Mesh, console: Console) -> None:
    lines = [*folded.forward, *folded.backward]
    shown = [line for line in lines if not preserves_layout(line.value)]
    if shown:
        table = _table(("operator", "phase", "strategy"), ("count",))
        for line in shown:
            strategy = format_strategy(line.value, mesh)
            _add(table, format_pattern(line.pattern, folded.repeats), line.value.phase, strategy, line.pattern.count)
        _print("Operators", table, console)
    left_out = sum(line.pattern.count for line in lines) - sum(line.pattern.count for line in shown)
    if left_out:
        console.print(
            Text(f"{left_out} operators follow their first input or handle whole tensors, and are not listed.")
        )


def _collectives(summary: PlanSummary) -> Table:
    table = _table(("phase", "kind", "axis"), ("count", "bytes", "predicted"))
    for total in summary.collectives:
        size, time = format_bytes(total.size_bytes), format_seconds(total.predicted_s)
        _add(table, total.phase, total.kind, total.axis, total.count, size, time)
    return table


def _memory(plan: ShardingPlan, memory: MemoryOutcome) -> Table:
    table, kind = _table(("tensors", "kind"), ("count", "bytes")), tenant_words(plan)
    for tenant in memory.tenants:
        _add(table, tenant.name, kind(tenant.kind), tenant.count, format_bytes(tenant.size_bytes))
    for each, size in memory.others.items():
        _add(table, "all others", kind(each), "", format_bytes(size))
    if memory.other_bytes and not memory.others:
        _add(table, "all others", "", "", format_bytes(memory.other_bytes))
    _add(table, "together", "", "", format_bytes(memory.peak.size_bytes))
    return table


def _redistributions(plan: ShardingPlan, folded: FoldedPlan) -> Table:
    reasons = RedistributionReasons(plan, folded.repeats)
    table = _table(("tensor", "phase", "path", "collectives", "why"), ("count", "predicted"))
    for cost in by_expense(plan, folded)[:MOST_EXPENSIVE]:
        line, entry = cost.line, cost.line.value
        steps = ", ".join(f"{c.kind} {c.axis} {format_bytes(c.size_bytes)}" for c in entry.collectives) or "none"
        steps = what_runs(entry, steps)
        pattern, path = format_pattern(line.pattern, folded.repeats), format_path(entry.path, plan.mesh)
        _add(table, pattern, entry.phase, path, steps, reasons.of(line), cost.count, format_seconds(cost.predicted_s))
    return table
