"""Planning measured: CPU seconds of every stage, size of the integer program, peak memory.

    python benchmarks/plan.py                    # Llama-3-8B on 8x8, GPT-2 and the demo model
    python benchmarks/plan.py --case llama3_8b   # one of them; llama3_8b_3d and _4d: meshes of three and four axes
    python benchmarks/plan.py --ties             # what deciding identical layers once costs and saves

Every case runs in a process of its own, so that its peak memory is its own. CPU seconds, not wall time: machines are
shared. For comparison: Meta's AutoParallel (meta-pytorch/autoparallel at a54c252, torch 2.13) on Llama-3-8B and 8x8, on
two CPU cores: 107 CPU seconds to trace, enumerate, price and solve, 49 more to apply, and 4.4 GiB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.remove(str(Path(__file__).resolve().parent))  # where solver.py would be found as the package

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 900


@dataclass(frozen=True)
class Case:
    """What to plan: a factory, a mesh and a machine."""

    factory: str
    mesh: str
    hardware: str


CASES = {
    "llama3_8b": Case("examples/llama.py:llama3_8b", "dp=8,tp=8", "dgx-h100"),
    "llama3_8b_3d": Case("examples/llama.py:llama3_8b", "rep=2,dp=4,tp=8", "dgx-h100"),
    "llama3_8b_4d": Case("examples/llama.py:llama3_8b", "a=2,b=2,c=4,d=4", "dgx-h100"),
    "llama3_8b_1d": Case("examples/llama.py:llama3_8b", "tp=8", "dgx-h100"),
    "gpt2": Case("examples/gpt2.py:gpt2", "dp=8,tp=8", "dgx-h100"),
    "demo": Case("examples/llama.py:demo", "dp=2,tp=2", "cpu-gloo"),
}
STAGES = ("import", "capture", "enumerate and price", "solve", "interpret", "write")


def measure(case: Case, tie_layers: bool) -> dict[str, object]:
    """Plans a case in this process; seconds are CPU seconds of this process."""
    marks = [time.process_time()]

    def mark() -> None:
        marks.append(time.process_time())

    from autoshard.capture import capture
    from autoshard.cli.model_factory import load_factory
    from autoshard.mesh import Mesh
    from autoshard.planning import formulate, interpret
    from autoshard.plans import dump_plan
    from cost_models import load_profile, optimizer_policy
    from solver import solve

    mark()
    model, args, kwargs = load_factory(case.factory)
    marks[-1] = time.process_time()
    graph = capture(model, args, kwargs)
    mark()
    profile = load_profile(case.hardware)
    formulation = formulate(
        graph, Mesh.parse(case.mesh), profile, tie_layers=tie_layers, policy=optimizer_policy("adamw")
    )
    mark()
    solution = solve(formulation.problem)
    mark()
    plan = interpret(formulation, solution, profile, "benchmark", "")
    mark()
    text = dump_plan(plan)
    mark()
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": dict(zip(STAGES, (after - before for before, after in pairwise(marks)), strict=True)),
        "nodes": len(graph.nodes),
        "strategies": sum(map(len, formulation.strategies)),
        "status": solution.status.name.lower(),
        "cost_ns": solution.cost,
        "gap": solution.gap,
        "peak_bytes": peak_bytes,
        "lines": len(text.splitlines()),
        **program_size(formulation.problem),
    }


def program_size(problem: object) -> dict[str, int]:
    """Variables and rows of the integer program after the reductions, worked out again and not timed."""
    from solver.backends.integer_program import build
    from solver.reductions import Chain, reduce

    chain = reduce(problem)  # type: ignore[arg-type]
    assert isinstance(chain, Chain)
    program = build(chain.problem)
    return {"variables": len(program.costs), "rows": len(program.lower)}


def in_own_process(name: str, tie_layers: bool) -> dict[str, object]:
    """The figures of one case, from a fresh interpreter."""
    command = [sys.executable, __file__, "--measure", name, *([] if tie_layers else ["--untied"])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_plans(names: list[str], console: Console) -> None:
    """A column per case: what planning it took."""
    results = {name: in_own_process(name, True) for name in names}
    table = Table(title="Planning, CPU seconds (one process, reading and writing included)")
    table.add_column("")
    for name in names:
        table.add_column(f"{name}\n{CASES[name].mesh}, {CASES[name].hardware}", justify="right")

    def row(title: str, text: Callable[[dict], str]) -> None:
        table.add_row(title, *(text(results[name]) for name in names))

    for stage in STAGES:
        row(stage, lambda r, stage=stage: f"{r['seconds'][stage]:.2f}")
    row("total", lambda r: f"{sum(r['seconds'].values()):.2f}")
    table.add_section()
    row("graph nodes", lambda r: f"{r['nodes']:,}")
    row("strategies", lambda r: f"{r['strategies']:,}")
    row("variables, reduced", lambda r: f"{r['variables']:,}")
    row("rows, reduced", lambda r: f"{r['rows']:,}")
    row("status, gap", lambda r: f"{r['status']}, {r['gap']:.1e}")
    row("predicted step ms", lambda r: f"{r['cost_ns'] / 1e6:,.1f}")
    row("plan file lines", lambda r: f"{r['lines']:,}")
    row("peak memory GiB", lambda r: f"{r['peak_bytes'] / 2**30:.2f}")
    console.print(table)


def print_ties(names: list[str], console: Console) -> None:
    """Tied against untied: the loss in cost and the gain in solving time."""
    table = Table(title="Deciding identical layers once")
    for heading in ("case", "tied ns", "untied ns", "loss", "solve tied", "solve untied"):
        table.add_column(heading, justify="right")
    for name in names:
        tied, untied = in_own_process(name, True), in_own_process(name, False)
        loss = tied["cost_ns"] / untied["cost_ns"] - 1  # type: ignore[operator]
        seconds = [f"{r['seconds']['solve']:.2f} s" for r in (tied, untied)]  # type: ignore[index]
        table.add_row(name, f"{tied['cost_ns']:,}", f"{untied['cost_ns']:,}", f"{loss:.4%}", *seconds)
    console.print(table)


def main() -> None:
    """Reads the arguments and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="which to plan; may be repeated")
    parser.add_argument("--ties", action="store_true", help="compare tied with untied layers (GPT-2 and the demo)")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--untied", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(CASES[arguments.measure], not arguments.untied)))
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    if arguments.ties:
        print_ties(arguments.case or ["demo"], console)
    else:
        print_plans(arguments.case or ["llama3_8b", "llama3_8b_1d", "gpt2", "demo"], console)


if __name__ == "__main__":
    main()
