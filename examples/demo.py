"""What ``make demo`` runs: plan, train in one process and in four, compare. Exits non-zero on any miss.

1. Plans ``examples/llama.py:demo`` for dp=2,tp=2 on cpu-gloo, and prints the plan.
2. Trains it 20 steps with AdamW on real text, in one process and in four.
3. The loss curves must agree within a relative 1e-4 (float32).
4. The collectives that were intercepted on each rank while a step ran must be those of the plan: kind, mesh axis, bytes
   and count.
"""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autoshard.plans import ShardingPlan, read_plan
from autoshard.plans.schedule import sent

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
WORK = ROOT / ".demo"

MESH = "dp=2,tp=2"
HARDWARE = "cpu-gloo"
PINS: tuple[str, ...] = (
    "tok_embeddings/embedding=dp:S(0) tp:R",
    "layers.*.attention.wo/mm=dp:S(0) tp:P(sum)",
    "layers.*.feed_forward.w2/mm=dp:S(0) tp:P(sum)",
)
"""What ``autoshard plan --pin`` is given. The free optimum of this small model is data parallel over both axes. With
the batch cut over dp, and addends over tp behind ``wo`` and ``w2``, the solver cuts the rest of attention and of the
MLP over tp by itself."""
TENSOR_AXIS = "tp"
CUT_MODULES = ("attention.wq", "attention.wo", "feed_forward.w1", "feed_forward.w2")

LIMIT = 1e-4
# Together under five minutes.
PLAN_TIMEOUT_S = 75.0
SHOW_TIMEOUT_S = 30.0
TRAIN_TIMEOUT_S = 90.0

AUTOSHARD = (sys.executable, "-m", "autoshard")

Records = Counter[tuple[str, str, int]]
"""How often a step runs each (kind, mesh axis, bytes)."""


class MissError(Exception):
    """Something is not as the demo promises."""


def run(command: Sequence[str], *, timeout_s: float) -> None:
    """Runs a program on one thread per process and the loopback interface.

    Raises:
        MissError: it failed, or took longer than ``timeout_s``.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    shown = " ".join(["autoshard", *command[len(AUTOSHARD) :]] if command[: len(AUTOSHARD)] == AUTOSHARD else command)
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    try:
        status = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise MissError(f"still running after {timeout_s:.0f} s: {shown}") from None
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on to its workers
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
    if status:
        raise MissError(f"exit status {status}: {shown}")


def make_plan(console: Console) -> ShardingPlan:
    """Plans through the command line, prints the plan and reads it back."""
    path = WORK / "plan.yaml"
    pins = [text for pin in PINS for text in ("--pin", pin)]
    if PINS:
        console.print(f"Pinned, so that the plan uses dp for the batch and {TENSOR_AXIS} for layers: {', '.join(PINS)}")
    target = ("examples/llama.py:demo", "--mesh", MESH, "--hardware", HARDWARE, *pins, "-o", str(path))
    run((*AUTOSHARD, "plan", *target), timeout_s=PLAN_TIMEOUT_S)
    run((*AUTOSHARD, "show", str(path)), timeout_s=SHOW_TIMEOUT_S)
    return read_plan(path)


def check_cut(plan: ShardingPlan, console: Console) -> list[str]:
    """Misses unless every layer multiplies by weights that are cut over the tensor axis."""
    axis = plan.mesh.index(TENSOR_AXIS)
    cut = {
        operator.name.partition("/")[0]
        for operator in plan.operators
        if operator.phase == "forward" and len(operator.inputs) == 2 and operator.inputs[1][axis].kind == "S"
    }
    layers = sorted({name.split(".")[1] for name in (p.name for p in plan.parameters) if name.startswith("layers.")})
    wanted = [f"layers.{layer}.{module}" for layer in layers for module in CUT_MODULES]
    missing = [module for module in wanted if module not in cut]
    console.print(
        f"Multiplied by weights cut over {TENSOR_AXIS}: {len(wanted) - len(missing)} of {len(wanted)} matrices"
    )
    return [f"{module} is not cut over {TENSOR_AXIS}" for module in missing]


def train(plan: ShardingPlan) -> tuple[list[float], list[list[float]], list[Records]]:
    """The loss curve of one process; the curves and the intercepted collectives of every rank."""
    single, out = WORK / "single.json", WORK / "parallel.json"
    ranks = [WORK / f"parallel.rank{rank}.json" for rank in range(plan.mesh.size)]
    for path in (single, *ranks):
        path.unlink(missing_ok=True)
    program = str(EXAMPLES / "train_demo.py")
    run((sys.executable, program, "--single", str(single)), timeout_s=TRAIN_TIMEOUT_S)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(plan.mesh.size))
    run((*torchrun, program, str(WORK / "plan.yaml"), str(out)), timeout_s=TRAIN_TIMEOUT_S)
    missing = [path.name for path in (single, *ranks) if not path.exists()]
    if missing:
        raise MissError(f"no results: {', '.join(missing)}")
    results = [json.loads(path.read_text()) for path in ranks]
    losses = [[float(loss) for loss in result["losses"]] for result in results]
    records = [Counter((kind, axis, int(size)) for kind, axis, size in result["records"]) for result in results]
    return json.loads(single.read_text())["losses"], losses, records


def compare_losses(single: list[float], ranks: list[list[float]], console: Console) -> list[str]:
    """Prints both curves; misses when any rank differs from the one process by more than the limit."""
    if any(len(losses) != len(single) for losses in ranks):
        return [f"{len(single)} losses in one process, {[len(losses) for losses in ranks]} on the ranks"]
    if not all(math.isfinite(loss) for losses in (single, *ranks) for loss in losses):
        return [f"a loss is not finite: {single} in one process, {ranks} on the ranks"]
    table = Table(title="Loss (float32)")
    for heading in ("step", "1 process", f"{len(ranks)} processes", "relative difference"):
        table.add_column(heading, justify="right")
    table.add_column("")
    differences = []
    for step, (alone, *others) in enumerate(zip(single, *ranks)):
        difference = max(abs(other - alone) / abs(alone) for other in others)
        differences.append(difference)
        bar = "#" * round(20 * alone / max(single))
        table.add_row(str(step), f"{alone:.6f}", f"{others[0]:.6f}", f"{difference:.1e}", bar)
    console.print(table)
    largest = max(differences)
    console.print(f"Largest relative difference on any rank: {largest:.1e} (at most {LIMIT:.0e} is allowed)")
    return [] if largest <= LIMIT else [f"the loss curves differ by {largest:.1e}, more than {LIMIT:.0e}"]


def totals(records: Records) -> dict[tuple[str, str], tuple[int, int]]:
    """Count and bytes of each (kind, mesh axis)."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for (kind, axis, size), count in records.items():
        seen, size_bytes = found.get((kind, axis), (0, 0))
        found[kind, axis] = (seen + count, size_bytes + count * size)
    return found


def planned_records(plan: ShardingPlan) -> Records:
    """The collectives that the plan says each rank runs in a step."""
    return Counter((c.kind, c.axis, c.size_bytes) for c in sent(plan))


def compare_collectives(planned: Records, executed: Sequence[Records], console: Console) -> list[str]:
    """Prints planned beside executed; misses when any rank ran anything else."""
    table = Table(title="Collectives of one step on one rank: planned, and intercepted while it ran")
    for heading in ("kind", "axis"):
        table.add_column(heading)
    for heading in ("planned", "executed", "planned bytes", "executed bytes"):
        table.add_column(heading, justify="right")
    table.add_column("")
    plan_totals, rank_totals = totals(planned), [totals(records) for records in executed]
    for kind, axis in sorted(plan_totals.keys() | {key for found in rank_totals for key in found}):
        count, size_bytes = plan_totals.get((kind, axis), (0, 0))
        ran = [found.get((kind, axis), (0, 0)) for found in rank_totals]
        verdict = "equal" if set(ran) == {(count, size_bytes)} else "[red]DIFFERENT[/red]"
        counts, sizes = (_distinct(pair[i] for pair in ran) for i in (0, 1))
        table.add_row(kind, axis, f"{count:,}", counts, f"{size_bytes:,}", sizes, verdict)
    console.print(table)
    if not planned:
        return ["the plan has no collective at all"]
    return [
        f"rank {rank} did not run what was planned: {sorted((planned - ran).items())} missing, "
        f"{sorted((ran - planned).items())} extra"
        for rank, ran in enumerate(executed)
        if ran != planned
    ]


def _distinct(values: Iterable[int]) -> str:
    return " / ".join(f"{value:,}" for value in sorted(set(values)))


def main() -> int:
    """Runs the demo and says what missed."""
    console = Console(highlight=False)
    WORK.mkdir(exist_ok=True)
    try:
        console.rule(f"Plan: a Llama of 4 layers on {MESH} ({HARDWARE})")
        plan = make_plan(console)
        misses = check_cut(plan, console)
        console.rule("Train: 20 AdamW steps on this repository's documents")
        single, ranks, executed = train(plan)
        misses += compare_losses(single, ranks, console)
        console.rule("Planned and executed")
        misses += compare_collectives(planned_records(plan), executed, console)
    except MissError as miss:
        misses = [str(miss)]
    for text in misses:
        console.print(f"[bold red]MISS[/bold red] {text}", soft_wrap=True)
    if not misses:
        console.print(f"[bold green]OK[/bold green] {len(executed)} processes ran exactly what was planned")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
