"""Are the prices right? Plans of the demo Llama, predicted with a calibrated profile and measured on the same ranks.

    python benchmarks/calibration.py one-host                # four gloo processes on this machine
    python benchmarks/calibration.py 200mbit                 # two hosts of two, the link between them shaped
    python benchmarks/calibration.py 1gbit --work .calibration-1gbit

One job of four ranks calibrates the mesh dp=2,tp=2, plans the model as experts do (data parallel, fully sharded, tensor
parallel over either axis, mixes of them) and as autoshard does, loads all plans side by side and times their steps in
interleaved rounds. A step is forward and backward with all reductions of gradients, without an optimizer; what hides
behind computation is predicted at the contention that was measured. It prints

- of each collective the error on sizes that were held out of the fit, 64 KiB and more;
- between two hosts, the fitted bandwidth of the slow axis beside what plain sockets reach;
- of each plan the predicted and the measured step, and the median error of all;
- how many pairs of plans are ordered as the machine orders them, of those that differ by more than the spread;
- the regret: how much slower the plan with the best prediction is than the one measured best.

``result.json`` in the work folder has the same for scripts, ``report.html`` there shows the calibration. A work folder
that has samples already is not measured again: remove it to start anew.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:] = [folder for folder in sys.path if Path(folder or ".").resolve() != HERE]  # has a solver.py of its own
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

MESH = "dp=2,tp=2"
FIRST_HELD_OUT_BYTES = 1 << 16
TIMEOUT_S = 600.0

COLUMNS = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
ROWS = ("attention.wo", "feed_forward.w2")


def pinned(batch: str, columns: str, rows: str, weights: str = "") -> tuple[str, ...]:
    """Pins: the layouts of the tokens, of the products by matrices cut by columns and by rows, of stored weights."""
    pins = [f"{name}={batch}" for name in ("tokens", "targets")]
    pins += [f"layers.*.{name}/mm={columns}" for name in COLUMNS] + [f"layers.*.{name}/mm={rows}" for name in ROWS]
    return (*pins, *([f"layers.*.weight={weights}"] if weights else []))


# What experts choose by hand. A product over tokens x width is cut S(0) by data and S(1) by tensor parallelism.
EXPERTS = {
    "DDP on both axes": pinned(*["dp:S(0) tp:S(0)"] * 3, "dp:R tp:R"),
    "FSDP on both axes": pinned(*["dp:S(0) tp:S(0)"] * 3, "dp:S(0) tp:S(0)"),
    "DDP on dp, FSDP on tp": pinned(*["dp:S(0) tp:S(0)"] * 3, "dp:R tp:S(0)"),
    "FSDP on dp, DDP on tp": pinned(*["dp:S(0) tp:S(0)"] * 3, "dp:S(0) tp:R"),
    "DDP on dp, TP on tp": pinned("dp:S(0) tp:R", "dp:S(0) tp:S(1)", "dp:S(0) tp:P(sum)"),
    "TP on dp, DDP on tp": pinned("dp:R tp:S(0)", "dp:S(1) tp:S(0)", "dp:P(sum) tp:S(0)"),
    "TP on both axes": pinned("dp:R tp:R", "dp:S(1) tp:S(1)", "dp:P(sum) tp:P(sum)"),
}
OPTIMUM = "the optimum"


@dataclass(frozen=True)
class Timed:
    """A plan: its step as predicted and as measured (median and the middle half of the rounds), in seconds."""

    name: str
    predicted_s: float
    compute_s: float
    communication_s: float
    measured_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class Verdict:
    """What the predictions are worth.

    Attributes:
        pairs, ordered: pairs of plans whose middle halves do not overlap, and how many are predicted in that order.
        regret: of the plan predicted best against the one measured best.
        speedup_worst, speedup_best: of the optimum over the slowest and the fastest expert plan, measured.
        error: of the predicted steps, relative to what was measured, the median over the plans.
    """

    pairs: int
    ordered: int
    regret: float
    speedup_worst: float
    speedup_best: float
    error: float


def judge(timed: Sequence[Timed]) -> Verdict:
    """Compares the order of predictions with the order of measurements."""
    clear = [(a, b) for a, b in combinations(timed, 2) if a.high_s < b.low_s or b.high_s < a.low_s]
    right = sum((a.predicted_s < b.predicted_s) == (a.measured_s < b.measured_s) for a, b in clear)
    chosen = min(timed, key=lambda plan: plan.predicted_s)
    best = min(timed, key=lambda plan: plan.measured_s)
    optimum = next(plan for plan in timed if plan.name == OPTIMUM)
    experts = [plan.measured_s for plan in timed if plan.name != OPTIMUM]
    return Verdict(
        pairs=len(clear),
        ordered=right,
        regret=chosen.measured_s / best.measured_s - 1.0,
        speedup_worst=max(experts) / optimum.measured_s,
        speedup_best=min(experts) / optimum.measured_s,
        error=median(abs(plan.predicted_s / plan.measured_s - 1.0) for plan in timed),
    )


def work(arguments: argparse.Namespace) -> None:
    """What every rank does."""
    from autoshard.measure import QUICK, THOROUGH, calibrate, start_job
    from autoshard.mesh import Mesh

    folder = arguments.work
    effort = replace(
        QUICK if arguments.quick else THOROUGH,
        budget_s=arguments.budget,
        max_bytes=arguments.max_bytes,
        max_width=1024,  # the model has no larger products
    )
    with start_job(Mesh.parse(MESH), "cpu", TIMEOUT_S) as job:
        console = Console(stderr=True, quiet=not job.is_first, width=None if sys.stderr.isatty() else 140)
        console.print("calibrating")
        found = calibrate(
            job, effort, folder / "samples.jsonl", folder / "profile.yaml", lambda done, total, what: None
        )
        plans = make_plans(job, folder / "profile.yaml", console)
        timed = time_plans(job, plans, arguments.rounds, console)
        if job.is_first:
            assert found is not None
            write_results(found, timed, folder)
        job.highest(0.0)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort about one teardown in four


def make_plans(job, profile: Path, console: Console) -> dict:
    """Every plan by its name, the same on all ranks: each rank makes its share of them."""
    import torch.distributed as dist

    import autoshard
    from llama import demo

    names = [*EXPERTS, OPTIMUM]
    texts: dict[str, str] = {}
    start = time.monotonic()
    for number, name in enumerate(names):
        if number % job.mesh.size == job.rank:
            model, args = demo()
            pins = EXPERTS.get(name, ())
            texts[name] = autoshard.dump_plan(
                autoshard.plan(
                    model,
                    args,
                    mesh=job.mesh,
                    hardware=str(profile),
                    pins=pins,
                    optimizer="none",
                    objective="overlapped-step-time",
                    name=name,
                )
            )
    gathered: list[dict[str, str]] = [{}] * job.mesh.size
    dist.all_gather_object(gathered, texts)
    texts = {name: text for share in gathered for name, text in share.items()}
    console.print(f"{len(names)} plans made in {time.monotonic() - start:.0f} s")
    return {name: autoshard.parse_plan(texts[name], name) for name in names}


def time_plans(job, plans: dict, rounds: int, console: Console) -> list[Timed]:
    """Steps of all plans in interleaved rounds; of every step the slowest rank counts."""
    import random

    import torch

    import autoshard
    from llama import demo

    start = time.monotonic()
    steps = {}
    for name, plan in plans.items():
        model, (tokens, _) = demo()
        tokens = torch.randint(256, tokens.shape, generator=torch.Generator().manual_seed(0))
        module = autoshard.parallelize(model, plan, job.device_mesh)
        steps[name] = module, autoshard.shard_inputs(plan, job.device_mesh, tokens, tokens)
    console.print(f"{len(plans)} plans lowered in {time.monotonic() - start:.0f} s")
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for round in range(-2, rounds):  # two to warm up
        order = list(plans)
        random.Random(round).shuffle(order)
        for name in order:
            module, inputs = steps[name]
            module.zero_grad(set_to_none=True)
            job.highest(0.0)
            before = time.perf_counter()
            module(*inputs).backward()
            (slowest,) = job.highest(time.perf_counter() - before)
            if round >= 0:
                seconds[name].append(slowest)
    console.print(f"{rounds} rounds in all {time.monotonic() - start:.0f} s")
    return [_timed(name, plan, seconds[name]) for name, plan in plans.items()]


def _timed(name: str, plan, seconds: list[float]) -> Timed:
    from autoshard.plans.simulation import overlapped_s

    low, _, high = quantiles(seconds, n=4)
    return Timed(name, overlapped_s(plan), plan.compute_s, plan.communication_s, median(seconds), low, high)


def write_results(found, timed: list[Timed], folder: Path) -> None:
    """Prints the tables and writes ``result.json`` and, where jinja2 is there, the report."""
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    errors = held_out(found.compared)
    table = Table(title="Collectives: error on held-out sizes of 64 KiB and more")
    for heading in ("axis", "kind", "median", "largest", "sizes"):
        table.add_column(heading)
    for (axis, kind), found_errors in errors.items():
        table.add_row(axis, kind, f"{median(found_errors):.0%}", f"{max(found_errors):.0%}", str(len(found_errors)))
    console.print(table)
    everything = [error for one in errors.values() for error in one]
    console.print(f"all of them: median {median(everything):.1%} of {len(everything)} points")
    bandwidth = slow_bandwidth(found.profile)
    if bandwidth:
        console.print(bandwidth["text"])
    print_plans(timed, console)
    verdict = judge(timed)
    console.print(verdict_text(verdict))
    result = {
        "held_out_median": median(everything),
        "errors": {f"{axis} {kind}": one for (axis, kind), one in errors.items()},
        "bandwidth": bandwidth,
        "plans": [asdict(plan) for plan in timed],
        "verdict": asdict(verdict),
    }
    (folder / "result.json").write_text(json.dumps(result, indent=1))
    try:
        from autoshard.measure.calibration_report import write_report
    except ModuleNotFoundError:
        return
    write_report(found, folder / "report.html", with_pictures=True)


def held_out(compared) -> dict[tuple[str, str], list[float]]:
    """Absolute relative errors of the sizes that were not fitted, by axis and kind."""
    found: dict[tuple[str, str], list[float]] = {}
    for one in compared:
        size = getattr(one.point, "size_bytes", 0)
        if one.point.held_out and size >= FIRST_HELD_OUT_BYTES:
            found.setdefault((one.point.axis, one.point.kind), []).append(abs(one.error))
    return found


def slow_bandwidth(profile) -> dict[str, object] | None:
    """The rate of the link between two hosts as the fit has it, beside what sockets reached; None on one host.

    An all-reduce of n bytes over two ranks sends n bytes each way; both groups of the axis dp share the link.
    """
    raw, shaped = (float(os.environ.get(f"TWO_HOSTS_{name}_BYTES_PER_S", 0)) for name in ("RAW", "RATE"))
    if not raw:
        return None
    topology = profile.topology(("dp", "tp"), (2, 2))
    small, large = 1 << 20, 1 << 22
    seconds = [topology.collective_s("all_reduce", 0, size) for size in (small, large)]
    fitted = 2 * (large - small) / (seconds[1] - seconds[0])
    text = (
        f"the link: shaped to {shaped / 1e6:.1f} MB/s, plain sockets reach {raw / 1e6:.1f}, the fit of all_reduce over "
        f"dp has {fitted / 1e6:.1f} ({fitted / raw - 1:+.1%} of the sockets)"
    )
    return {"shaped": shaped, "raw": raw, "fitted": fitted, "error": fitted / raw - 1, "text": text}


def print_plans(timed: list[Timed], console: Console) -> None:
    """A row per plan, the fastest first."""
    table = Table(title="Steps in ms: forward and backward, the slowest rank, median of interleaved rounds")
    table.add_column("plan")
    for heading in ("predicted", "compute", "communication", "measured", "middle half", "measured / predicted"):
        table.add_column(heading, justify="right")
    for plan in sorted(timed, key=lambda plan: plan.measured_s):
        said = (plan.predicted_s, plan.compute_s, plan.communication_s, plan.measured_s)
        spread = f"{plan.low_s * 1e3:.0f} to {plan.high_s * 1e3:.0f}"
        ratio = f"{plan.measured_s / plan.predicted_s:.2f}"
        table.add_row(plan.name, *(f"{s * 1e3:.0f}" for s in said), spread, ratio)
    console.print(table)


def verdict_text(verdict: Verdict) -> str:
    """The verdict in words."""
    share = f" ({verdict.ordered / verdict.pairs:.0%})" if verdict.pairs else ""
    return (
        f"{verdict.ordered} of {verdict.pairs} clearly different pairs are predicted in the right order{share}; the "
        f"regret is {verdict.regret:.1%}; the optimum is {verdict.speedup_worst:.2f}x as fast as the slowest expert "
        f"plan and {verdict.speedup_best:.2f}x as fast as the fastest; the median error of steps is {verdict.error:.1%}"
    )


def command(arguments: argparse.Namespace) -> list[str]:
    """What starts the four ranks."""
    own = [str(Path(__file__).resolve()), arguments.where, "--worker", "--work", str(arguments.work)]
    own += ["--rounds", str(arguments.rounds), "--budget", str(arguments.budget)]
    own += ["--max-bytes", str(arguments.max_bytes), *(["--quick"] if arguments.quick else [])]
    if arguments.where == "one-host":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", *own]
    return [sys.executable, str(HERE / "two_hosts.py"), "--rate", arguments.where, "--", *own]


def main() -> int:
    """Starts the ranks, or is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", metavar="one-host|RATE", help="one-host, or the rate of a link, for example 200mbit")
    parser.add_argument("--work", type=Path, help="the folder for samples and results (default: .calibration-WHERE)")
    parser.add_argument("--rounds", type=int, default=15, help="of steps (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=150.0, metavar="SECONDS", help="for calibrating")
    parser.add_argument("--max-bytes", type=int, default=8 << 20, metavar="BYTES", help="largest buffer calibrated")
    parser.add_argument("--quick", action="store_true", help="calibrate as --quick does")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.work = (arguments.work or ROOT / f".calibration-{arguments.where}").resolve()
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        work(arguments)
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | os.environ
    return subprocess.run(command(arguments), env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
