"""Planning measured: CPU seconds of every stage, peak memory, and what is proved.

    python benchmarks/plan.py                    # every case, about 20 CPU minutes
    python benchmarks/plan.py --case llama3_8b   # one of them; may be repeated
    python benchmarks/plan.py --ties             # what deciding identical layers once costs and saves

Every case runs in a process of its own, so that its peak memory is its own. CPU seconds, not wall time: machines are
shared. Beside them stands the ratio to Llama-3-8B on 8x8 without a budget, which always runs, and under those of a
stage the ratio to that stage of it. What is asked for is in seconds of a machine on which
6b8e1c8 took 16.8 for that case (``autoshard plan examples/llama.py:llama3_8b --mesh dp=8,tp=8 --hardware dgx-h100``);
run that commit on yours, and ``--reference SECONDS`` converts. A case is planned as the command plans it: with a
schedule, with recomputation decided by the program, its course of memory counted.
For comparison: Meta's AutoParallel (meta-pytorch/autoparallel at a54c252, torch 2.13) on Llama-3-8B
and 8x8, on two CPU cores: 107 CPU seconds to trace, enumerate, price and solve, 49 more to apply, and 4.4 GiB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.remove(str(Path(__file__).resolve().parent))  # where solver.py would be found as the package

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Case:
    """What to plan: a factory, a mesh, a machine and a budget, and what is asked of it."""

    factory: str
    mesh: str
    hardware: str
    memory: str | None = None
    must: str = ""
    """Gap, and seconds on a machine on which 6b8e1c8 takes FIRST_S for the first case."""
    first_version: str = ""
    """What autoshard at 6b8e1c8 answered, on such a machine."""


FIRST, FIRST_S = "llama3_8b", 16.8
LLAMA, LLAMA_70B = "examples/llama.py:llama3_8b", "examples/llama.py:llama3_70b"
CASES = {
    FIRST: Case(LLAMA, "dp=8,tp=8", "dgx-h100", None, "proved, 16.8 s", "proved, 16.8 s"),
    "llama3_8b_26GiB": Case(LLAMA, "dp=8,tp=8", "dgx-h100", "26GiB", "0.5%, 30 s", "7.5%, minutes"),
    "llama3_8b_16GiB": Case(LLAMA, "dp=8,tp=8", "dgx-h100", "16GiB", "0.5%, 30 s", "16%, minutes"),
    "llama3_8b_10GiB": Case(LLAMA, "dp=8,tp=8", "dgx-h100", "10GiB", "0.5%, 30 s", "none"),
    "llama3_8b_3d": Case(LLAMA, "rep=2,dp=4,tp=8", "dgx-h100", None, "proved, 60 s, 2 GiB", "7.8%, 148 s"),
    "llama3_8b_3d_20GiB": Case(LLAMA, "rep=2,dp=4,tp=8", "dgx-h100", "20GiB", "0.5%, 90 s", "none"),
    "llama3_8b_4d": Case(LLAMA, "a=2,b=2,c=4,d=4", "dgx-h100", None, "3%, 180 s", "none"),
    "llama3_70b": Case(LLAMA_70B, "dp=8,tp=8", "dgx-h100", None, "proved, 1.3 times 8B"),
    "llama3_70b_80GB": Case(LLAMA_70B, "dp=8,tp=8", "dgx-h100", "80GB", "0.5%, 60 s", "does not fit"),
    "moe_8x7b_80GB": Case("examples/moe.py:moe_8x7b", "rep=2,dp=4,tp=8", "dgx-h100", "80GB", "1%, 120 s", "none"),
    "llama3_8b_1d": Case(LLAMA, "tp=8", "dgx-h100"),
    "gpt2": Case("examples/gpt2.py:gpt2", "dp=8,tp=8", "dgx-h100"),
    "demo": Case("examples/llama.py:demo", "dp=2,tp=2", "cpu-gloo"),
}
STAGES = ("import", "capturing the training step", "enumerating and pricing strategies", "solving", "write")
HEADINGS = (
    *("case", "import", "capture", "price", "solve", "write", "CPU s", "ratio", "there s", "peak GiB"),
    *("step ms", "gap", "in use GiB", "must", "first version"),
)


def measure(case: Case, tie_layers: bool) -> dict[str, Any]:
    """Plans a case in this process, as the command does; seconds are CPU seconds of this process."""
    from autoshard.garbage import seldom_collected

    with seldom_collected():
        return _measured(case, tie_layers)


def _measured(case: Case, tie_layers: bool) -> dict[str, Any]:
    seconds: dict[str, float] = {}
    stage, since_s = "import", 0.0

    def begin(name: str) -> None:
        nonlocal stage, since_s
        name = name.partition(":")[0]  # behind it stands how far the stage has come
        now_s = time.process_time()
        seconds[stage] = seconds.get(stage, 0.0) + now_s - since_s
        stage, since_s = name, now_s

    from autoshard.cli.model_factory import load_factory
    from autoshard.constraints import Constraints
    from autoshard.planning.limit import memory_limit
    from autoshard.planning.planner import Planner
    from autoshard.plans import dump_plan
    from cost_models import load_profile

    model, args, kwargs = load_factory(case.factory)
    profile = load_profile(case.hardware)
    limit = memory_limit("adamw", case.memory, None, profile)
    planner = Planner.of_model(
        model, args, kwargs, case.mesh, profile, report=begin, tie_layers=tie_layers, limit=limit
    )
    plan = planner.plan(Constraints(()), report=begin)
    begin("write")
    text = dump_plan(plan)
    begin("end")
    return {
        "seconds": seconds,
        "total_s": sum(seconds.values()),
        "nodes": len(planner.graph.nodes),
        "status": plan.solver.status,
        "cost_ns": plan.solver.cost_ns,
        "gap": plan.solver.gap,
        "in_use_bytes": plan.memory.peak.size_bytes if plan.memory else 0,
        "bucket_bytes": plan.bucket_bytes,
        "lines": len(text.splitlines()),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_own_process(name: str, tie_layers: bool = True) -> dict[str, Any] | None:
    """The figures of one case, from a fresh interpreter; None where it has no answer in time."""
    command = [sys.executable, __file__, "--measure", name, *([] if tie_layers else ["--untied"])]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def print_plans(names: list[str], reference_s: float | None, console: Console) -> None:
    """A row per case, as each is done: what planning it took, beside what is asked and what the first version did."""
    table = Table(title=f"Planning; there, as in must: where 6b8e1c8 takes {FIRST_S} s for {FIRST}")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "case" else "right")
    first = in_own_process(FIRST)
    assert first is not None
    for name in dict.fromkeys((FIRST, *names)):
        found = first if name == FIRST else in_own_process(name)
        case = CASES[name]
        given = (f"{name}\n{case.mesh}, {case.memory or 'no budget'}",)
        if found is None:
            table.add_row(*given, f"none in {TIMEOUT_S} s", *[""] * (len(HEADINGS) - 4), case.must, case.first_version)
            continue
        gap = "proved" if found["status"] == "optimal" else f"{found['gap']:.2%}"
        print(name, gap, f"{found['total_s']:.1f} s", file=sys.stderr, flush=True)
        table.add_row(
            *given,
            *(_of_stage(found["seconds"][stage], first["seconds"][stage]) for stage in STAGES),
            f"{found['total_s']:.1f}",
            f"{found['total_s'] / first['total_s']:.2f}",
            f"{found['total_s'] * FIRST_S / reference_s:.1f}" if reference_s else "",
            f"{found['peak_bytes'] / 2**30:.2f}",
            f"{found['cost_ns'] / 1e6:,.1f}",
            gap,
            f"{found['in_use_bytes'] / 2**30:.1f}",
            case.must,
            case.first_version,
        )
    console.print(table)


def _of_stage(seconds: float, of_first: float) -> str:
    """The CPU seconds of a stage over their ratio to those of the first case."""
    return f"{seconds:.2f}\n{seconds / of_first:.2f}"


def print_ties(names: list[str], console: Console) -> None:
    """Tied against untied: the loss in cost and the gain in solving time."""
    table = Table(title="Deciding identical layers once")
    for heading in ("case", "tied ns", "untied ns", "loss", "solving tied", "solving untied"):
        table.add_column(heading, justify="right")
    for name in names:
        tied, untied = in_own_process(name), in_own_process(name, tie_layers=False)
        if tied is None or untied is None:
            table.add_row(name, f"none in {TIMEOUT_S} s")
            continue
        loss = tied["cost_ns"] / untied["cost_ns"] - 1
        seconds = [f"{found['seconds']['solving']:.2f} s" for found in (tied, untied)]
        table.add_row(name, f"{tied['cost_ns']:,}", f"{untied['cost_ns']:,}", f"{loss:.4%}", *seconds)
    console.print(table)


def main() -> None:
    """Reads the arguments and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=CASES, help="which to plan; may be repeated")
    parser.add_argument("--reference", type=float, help="CPU seconds that 6b8e1c8 takes for the first case here")
    parser.add_argument("--ties", action="store_true", help="compare tied with untied layers (the demo)")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--untied", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(CASES[arguments.measure], not arguments.untied)))
        return
    console = Console(width=None if sys.stdout.isatty() else 190)
    if arguments.ties:
        print_ties(arguments.case or ["demo"], console)
    else:
        print_plans(arguments.case or list(CASES), arguments.reference, console)


if __name__ == "__main__":
    main()
