"""The solver on the IOPDDL instances, beside the best published results: `python benchmarks/solver.py [G A M S]`.

Every instance is solved within its contest time limit, loading included, and every printed cost comes from the
evaluator on the original instance. Costs and lower bounds are those that the contest and its winners published (its
machine: 8 cores, 32 GB); the instances are those of https://github.com/google/iopddl, in the folder `FOLDER`.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# This file is called like the package that it measures: look for the package first.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from solver import evaluate, solve  # noqa: E402
from solver.iopddl import read_problem  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "iopddl"


@dataclass(frozen=True)
class Instance:
    """An instance of the contest: its file, time limit, and the best published cost and lower bound."""

    file: str
    limit_s: float
    best_cost: int
    best_bound: int


INSTANCES = {
    "G": Instance("asplos-2025-iopddl-G.json.gz", 120, 217_039, 216_931),
    "A": Instance("asplos-2025-iopddl-A.json.gz", 60, 6_548_641_531, 6_513_812_172),
    "M": Instance("asplos-2025-iopddl-M.json.gz", 180, 49_928_460_991, 49_407_421_919),
    "S": Instance("asplos-2025-iopddl-S.json.gz", 240, 1_534_613_444, 1_511_240_136),
}

HEADER = (
    f"{'':2}{'status':>9} {'cost':>15} {'bound':>15} {'gap':>9} {'seconds':>8} {'limit':>6}"
    f" {'best published':>15} {'cost / best':>11} {'its bound':>15}"
)


def run(name: str, folder: Path, backend: str, limit_s: float | None) -> str:
    """Solves one instance; its line of the table."""
    instance = INSTANCES[name]
    limit_s = instance.limit_s if limit_s is None else limit_s
    started_s = time.monotonic()
    problem = read_problem(folder / instance.file)
    # The judging of the answer and the end of native calls take a moment after the limit.
    left_s = max(1.0, limit_s - (time.monotonic() - started_s) - 1.0)
    solution = solve(problem, backend=backend, time_limit_s=left_s)
    seconds = time.monotonic() - started_s
    if solution.choices is None:
        return f"{name:2}{solution.status.name.lower():>9} {solution.report.explanation}"
    judged = evaluate(problem, solution.choices)
    assert judged.feasible, judged.violations
    return (
        f"{name:2}{solution.status.name.lower():>9} {judged.cost:15,} {solution.bound or 0:15,} {solution.gap:9.2e} "
        f"{seconds:8.1f} {limit_s:6.0f} {instance.best_cost:15,} {judged.cost / instance.best_cost:11.5f} "
        f"{instance.best_bound:15,}"
    )


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("instances", nargs="*", default=list(INSTANCES), metavar="instance", help="G, A, M or S")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="default: %(default)s")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--time-limit", type=float, help="seconds, instead of the contest's")
    options = parser.parse_args()
    unknown = [name for name in options.instances if name not in INSTANCES]
    if unknown:
        parser.error(f"unknown instance {unknown[0]!r}: choose among {', '.join(INSTANCES)}")
    if not options.folder.is_dir():
        print(f"{options.folder} is absent: give the folder of the instances with --folder", file=sys.stderr)
        return 2
    print(HEADER)
    for name in options.instances:
        print(run(name, options.folder, options.backend, options.time_limit), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
