"""Plans under ever smaller budgets, run by real gloo processes: what they hold, whether they train as one process does.

    python benchmarks/budgets.py                  # the demo Llama and GPT-2 on dp=2,tp=2 under shares of the free peak
    python benchmarks/budgets.py --model gpt2     # one model
    python benchmarks/budgets.py --micro-batches 4  # steps of so many
    python benchmarks/budgets.py --time-limit 60  # wall-clock seconds of the solver for each plan
    python benchmarks/budgets.py --json out.json  # the figures too

A row is a plan, for the seconds that a step takes and its gap. Where no plan fits a share, the row says the smallest
budget found to work, and a further row is the plan under that. Four processes train: the peak of the third step is
measured by a watch of every storage that torch makes, each rank's against its own prediction. Loss, gradients and
parameters are compared with one process, executed collectives with planned ones (`tests.distributed.parity`), and so
are products and activations, the first time and again. Exits with 1 where anything is not as planned.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# the root in the place of this folder, where solver.py would be found as the package
sys.path[:] = [str(ROOT), *(path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent)]

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

import autoshard  # noqa: E402
from autoshard.errors import BudgetError  # noqa: E402
from autoshard.plans.schedule import sent  # noqa: E402
from autoshard.plans.units import format_bytes, format_seconds  # noqa: E402
from tests.distributed import cases  # noqa: E402
from tests.distributed.harness import RankError, run_ranks  # noqa: E402
from tests.distributed.operators import planned_operators  # noqa: E402
from tests.distributed.planned_run import PlannedRun, run_planned  # noqa: E402

MODELS, MESH, HARDWARE = ("demo", "gpt2"), "dp=2,tp=2", "cpu-gloo"
SHARES = (1.0, 0.7, 0.5, 0.4, 0.3)
MOST_OFF, MOST_DIFFERENT = 0.03, 1e-4
TIMEOUT_S = 300.0
Options = dict[str, Any]
LEAST = re.compile(r"found to work is [^(]*\((\d+) bytes")


@dataclass(frozen=True)
class Row:
    """A plan under a budget, and what four processes made of it: bytes of the rank that is furthest off, the largest
    relative difference from one process, and what was not as planned.
    """

    model: str
    asked: str
    budget_bytes: int
    cpu_s: float
    step_s: float = 0.0
    gap: float = 0.0
    again: int = 0
    predicted_bytes: int = 0
    measured_bytes: int = 0
    difference: float = 0.0
    collectives: int = 0
    operators: int = 0
    wrong: str = ""
    least_bytes: int = 0


def planned(model: str, memory: int | None, options: Options) -> autoshard.ShardingPlan:
    """The plan of a model of the distributed tests under a budget."""
    module, args = cases.make(model)
    known: Options = {"mesh": MESH, "hardware": HARDWARE, "cache": False}  # what is measured is made
    return autoshard.plan(module, args, memory=memory, **known, **options)


def executed(row: Row, plan: autoshard.ShardingPlan) -> Row:
    """The row with what four processes make of its plan."""
    said: dict[str, Any] = asdict(row) | {
        "step_s": plan.step_s,
        "gap": plan.solver.gap,
        "again": len(plan.recomputed),
        "collectives": sum(1 for _ in sent(plan)),
        "operators": planned_operators(plan).total(),
    }
    text = autoshard.dump_plan(plan)
    try:
        ranks: list[PlannedRun] = run_ranks(plan.mesh.size, run_planned, row.model, text, timeout_s=TIMEOUT_S)
    except RankError as error:
        return Row(**said | {"wrong": str(error)})
    furthest = max(ranks, key=lambda rank: abs(rank.off))
    difference = max(rank.difference for rank in ranks)
    wrong = {
        "peak": abs(furthest.off) > MOST_OFF,
        "budget": max(rank.measured_bytes for rank in ranks) > row.budget_bytes,
        "parity": difference > MOST_DIFFERENT,
        "operators": not all(rank.runs_as_planned for rank in ranks),
    }
    peaks = {"predicted_bytes": furthest.predicted_bytes, "measured_bytes": furthest.measured_bytes}
    said |= {**peaks, "difference": difference, "wrong": ", ".join(name for name, is_so in wrong.items() if is_so)}
    return Row(**said)


def rows_of(model: str, options: Options) -> Iterator[Row]:
    """The plans of a model, from the whole of the free peak down to the least budget that works."""
    free = planned(model, None, options).memory
    assert free is not None
    for share in SHARES:
        budget = int(free.peak.size_bytes * share)
        row = row_of(model, f"{share:.0%}", budget, options)
        yield row
        if row.least_bytes:
            yield row_of(model, "least", row.least_bytes, options)
            return


def row_of(model: str, asked: str, budget: int, options: Options) -> Row:
    """The plan under a budget, executed; or the smallest budget found to work."""
    started = time.process_time()
    try:
        plan = planned(model, budget, options)
    except BudgetError as error:
        found = LEAST.search(str(error))
        assert found is not None, error
        return Row(model, asked, budget, time.process_time() - started, least_bytes=int(found[1]))
    return executed(Row(model, asked, budget, time.process_time() - started), plan)


def cells(row: Row) -> tuple[str, ...]:
    """The row as text."""
    head = row.model, row.asked, format_bytes(row.budget_bytes), f"{row.cpu_s:.0f}"
    if row.least_bytes:
        return (*head, f"no plan; {format_bytes(row.least_bytes)} works")
    return (
        *head,
        f"{format_seconds(row.step_s)}, gap {row.gap:.1%}",
        str(row.again),
        format_bytes(row.predicted_bytes),
        format_bytes(row.measured_bytes),
        "" if not row.measured_bytes else f"{row.predicted_bytes / row.measured_bytes - 1:+.2%}",
        f"{row.difference:.0e}",
        f"{row.collectives}",
        f"{row.operators}",
        row.wrong.splitlines()[0] if row.wrong else "as planned",
    )


def main() -> None:
    """Reads the arguments, plans and runs, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, help="one model only")
    parser.add_argument("--micro-batches", type=int, default=1, help="how many make a step")
    parser.add_argument("--time-limit", type=float, help="wall-clock seconds of the solver for each plan")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table(title="Plans under budgets, run by 4 gloo processes")
    left, right = ("model", "share"), ("budget", "CPU s", "step", "again", "peak", "measured", "off", "parity")
    for heading in (*left, *right, "collectives", "operators", "executed"):
        table.add_column(heading, justify="left" if heading in left else "right")
    rows = []
    options: Options = {"time_limit_s": arguments.time_limit, "micro_batches": arguments.micro_batches}
    for model in MODELS if arguments.model is None else (arguments.model,):
        for row in rows_of(model, options):
            print(" | ".join(cells(row)), file=sys.stderr, flush=True)
            table.add_row(*cells(row))
            rows.append(row)
    Console(width=None if sys.stdout.isatty() else 180).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    raise SystemExit(1 if any(row.wrong for row in rows) else 0)


if __name__ == "__main__":
    main()
