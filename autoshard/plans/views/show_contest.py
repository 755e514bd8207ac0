"""A contest as a table; like :mod:`autoshard.plans.views.show` it needs rich and is not exported by the package."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plan import ShardingPlan
from ..simulation import overlapped_s
from ..units import format_bytes, format_seconds
from .contest import Contender, Contest, first_difference
from .summary import summarize

_NUMBERS = ("step", "overlapped", "compute", "communication", "optimizer", "memory", "over optimum")


def show_contest(contest: Contest, console: Console) -> None:
    """Prints the table, then one line on what it proves."""
    optimum = contest.optimum.plan
    assert optimum is not None
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("plan", "status"):
        table.add_column(title, overflow="fold")
    for title in _NUMBERS:
        table.add_column(title, overflow="fold", justify="right")
    table.add_column("first difference from the optimum", overflow="fold")
    for contender in (contest.optimum, *contest.baselines):
        table.add_row(*(Text(cell) for cell in _cells(contender, optimum)))
    console.print(table)
    console.print()
    console.print(Text(verdict(contest)))


def verdict(contest: Contest) -> str:
    """What a contest proves, in a sentence."""
    optimum, best = contest.optimum.plan, contest.best
    assert optimum is not None
    if best is None or best.plan is None:
        return "No baseline has a plan here; the optimum stands alone."
    solver = optimum.solver
    less = 1 - solver.cost_ns / best.plan.solver.cost_ns
    proof = f"proved {solver.verdict}" if solver.status == "optimal" else f"within {solver.gap:.2%} of the best"
    said = f" Its bound is one for {contest.optimum.reason}." if contest.optimum.reason else ""
    return (
        f"The optimum ({proof}) is predicted to take {format_seconds(solver.cost_ns / 1e9)}, {less:.1%} less than the "
        f"best baseline, {best.name}: {best.title}.{said}"
    )


def _cells(contender: Contender, optimum: ShardingPlan) -> list[str]:
    plan = contender.plan
    if plan is None:
        return [contender.name, "no plan", *("-" for _ in _NUMBERS), contender.reason]
    numbers = [
        format_seconds(plan.step_s),
        format_seconds(overlapped_s(plan)),
        format_seconds(plan.compute_s),
        format_seconds(plan.communication_s),
        format_seconds(plan.optimizer_s or 0.0),
        format_bytes(memory_bytes(plan)),
        f"{plan.solver.cost_ns / optimum.solver.cost_ns:.3f}",
    ]
    difference = first_difference(optimum, plan)
    where = "" if plan is optimum else "none" if difference is None else str(difference)
    return [contender.name, plan.solver.status, *numbers, where]


def memory_bytes(plan: ShardingPlan) -> int:
    """The peak of a step on the rank with the largest shards; of a plan of old, its parameters alone."""
    return summarize(plan).parameter_bytes_per_rank if plan.memory is None else plan.memory.peak.size_bytes
