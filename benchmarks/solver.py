"""The solver on real sharding problems with published results: IOPDDL, the ASPLOS / EuroSys 2025 contest.

    python benchmarks/solver.py                      # G, A, M, S, each within the contest's time limit
    python benchmarks/solver.py --instance G A       # some of them
    python benchmarks/solver.py --folder DIR FILE…   # other instances of the suite, with --time-limit

Each instance is solved by ``python -m solver`` in a process of its own; the time limit covers reading. Every cost
printed comes from the evaluator on the instance as it was read again from its file. Published results:
../shared/iopddl/README.md (contest machine: 8 cores). Exits with 1 where a cost is above what it must at most be.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.remove(str(Path(__file__).resolve().parent))  # where this file would be found as the package it measures

from solver import evaluate
from solver.iopddl import read_problem

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT.parent / "shared" / "iopddl"


@dataclass(frozen=True)
class Known:
    """An instance: its limit in seconds, what it must cost at most, the best published cost and the published bound."""

    limit_s: float
    at_most: int
    best: int
    bound: int


KNOWN = {
    "G": Known(120, 217_039, 217_039, 216_931),
    "A": Known(60, 6_548_641_531, 6_548_641_531, 6_513_812_172),
    "M": Known(180, 75_000_000_000, 49_928_460_991, 49_407_421_919),
    "S": Known(240, 2_450_000_000, 1_534_613_444, 1_511_240_136),
}


@dataclass(frozen=True)
class Run:
    """What one run gave: wall and CPU seconds include reading and writing."""

    name: str
    status: str
    cost: int | None
    bound: int | None
    wall_s: float
    cpu_s: float


def run(name: str, path: Path, limit_s: float) -> Run:
    """Solves one instance in a process of its own and judges its choices here."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "solution.json"
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [sys.executable, "-m", "solver", str(path), "--time-limit", str(limit_s), "-o", str(out)]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=2 * limit_s + 60, check=False)
        wall_s, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found = json.loads(out.read_text()) if out.exists() else {"status": "nothing", "choices": None, "bound": None}
    cost = None
    if found["choices"] is not None:
        judged = evaluate(read_problem(path), found["choices"])
        cost = judged.cost if judged.feasible else None
    return Run(name, found["status"], cost, found["bound"], wall_s, cpu_s)


def print_runs(runs: list[Run], console: Console) -> None:
    """A row per instance: the best published result beside ours."""
    table = Table(title="IOPDDL, reading included")
    for heading in (
        "instance",
        "limit s",
        "must cost at most",
        "best published",
        "ours",
        "our bound",
        "gap",
        "over best",
    ):
        table.add_column(heading, justify="right")
    for heading in ("status", "wall s", "CPU s"):
        table.add_column(heading, justify="right")
    for r in runs:
        known = KNOWN.get(r.name)
        gap = "-" if r.cost is None or r.bound is None else f"{(r.cost - r.bound) / max(1, abs(r.cost)):.4%}"
        over = "-" if known is None or r.cost is None else f"{r.cost / known.best - 1:+.2%}"
        published = [f"{known.limit_s:g}", f"{known.at_most:,}", f"{known.best:,}"] if known else ["-", "-", "-"]
        numbers = ["-" if value is None else f"{value:,}" for value in (r.cost, r.bound)]
        table.add_row(r.name, *published, *numbers, gap, over, r.status, f"{r.wall_s:.1f}", f"{r.cpu_s:.1f}")
    console.print(table)


def main() -> int:
    """Reads the arguments, runs, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instance", nargs="+", choices=KNOWN, default=list(KNOWN))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the instances are")
    parser.add_argument("--time-limit", type=float, help="seconds for each, instead of the contest's")
    parser.add_argument("files", nargs="*", type=Path, help="other instances (give --time-limit too)")
    options = parser.parse_args()
    if options.files and options.time_limit is None:
        parser.error("other instances need --time-limit")
    if options.files:
        jobs = [(path.name, path, options.time_limit) for path in options.files]
    else:
        paths = {name: options.folder / f"asplos-2025-iopddl-{name}.json.gz" for name in options.instance}
        jobs = [(name, path, options.time_limit or KNOWN[name].limit_s) for name, path in paths.items()]
    missing = [str(path) for _, path, _ in jobs if not path.exists()]
    if missing:
        parser.error(f"no such instance: {', '.join(missing)}; the instances are data, not part of the repository")
    runs = [run(*job) for job in jobs]
    print_runs(runs, Console(width=None if sys.stdout.isatty() else 170))
    late = [r.name for r in runs if r.name in KNOWN and (r.cost is None or r.cost > KNOWN[r.name].at_most)]
    if late:
        print(f"above what it must cost at most: {', '.join(late)}", file=sys.stderr)
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
