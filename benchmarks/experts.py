"""The optimum against the schemes people choose by hand: predicted for large models, measured on real processes.

    python benchmarks/experts.py                  # both halves
    python benchmarks/experts.py --predicted      # the first alone
    python benchmarks/experts.py --measured       # the second alone
    python benchmarks/experts.py --predicted --case llama3_8b
    python benchmarks/experts.py --predicted --overlap        # of steps in which communication hides

Predicted: every case is planned on 8 and on 8 x 8 GPUs of ``dgx-h100`` with 80 GB each, by ``autoshard compare`` in a
process of its own. Measured: a small Llama on 4 gloo processes, on one host and on the two hosts of
``benchmarks/two_hosts.py`` where this machine can build them, under a memory budget that data parallelism does not fit.
All plans run in one set of processes, a step of each in turn. In both halves, experts whose plan is over the budget
run with selective and with full recomputation too, and the optimum may then compute again what it likes.

Exit codes: 0 no expert wins, 1 one does (predicted: at all; measured: by more than its spread), 2 a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
if str(ROOT / "benchmarks") in sys.path:
    sys.path.remove(str(ROOT / "benchmarks"))  # where solver.py would be found as the package

TIMEOUT_S = 3600
SOLVER_S = 120
"""Wall-clock seconds of the solver for each plan of the first half."""
ROUNDS = 15
RATE = "200mbit"
UNABLE = 77
SHARE_OF_DDP = 0.6
"""The budget of the measured half, as a share of what data parallelism needs."""

Example = tuple[Any, tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """A model and what it is planned for; ``factory`` is a function of this file."""

    factory: str
    mesh: str


def llama3_8b_8() -> Example:
    """16 sequences of 2,048 tokens."""
    from examples.llama import llama3_8b

    return llama3_8b(16, 2048)


def llama3_8b_64() -> Example:
    """128 sequences of 2,048 tokens."""
    from examples.llama import llama3_8b

    return llama3_8b(128, 2048)


def llama3_70b_8() -> Example:
    """8 sequences of 2,048 tokens."""
    from examples.llama import llama3_70b

    return llama3_70b(8, 2048)


def llama3_70b_64() -> Example:
    """16 sequences of 8,192 tokens: as many tokens as 64 of 2,048, at the length that it is trained with."""
    from examples.llama import llama3_70b

    return llama3_70b(16, 8192)


def gpt2_xl_8() -> Example:
    """32 sequences of 1,024 tokens."""
    from examples.gpt2 import gpt2_xl

    return gpt2_xl(32)


def gpt2_xl_64() -> Example:
    """256 sequences of 1,024 tokens."""
    from examples.gpt2 import gpt2_xl

    return gpt2_xl(256)


def vit_l_8() -> Example:
    """512 images."""
    from examples.vit import vit_l

    return vit_l(512)


def vit_l_64() -> Example:
    """4,096 images."""
    from examples.vit import vit_l

    return vit_l(4096)


def moe_8() -> Example:
    """8 sequences of 2,048 tokens."""
    from examples.moe import moe_8x7b

    return moe_8x7b(8)


def moe_64() -> Example:
    """64 sequences of 2,048 tokens."""
    from examples.moe import moe_8x7b

    return moe_8x7b(64)


def measured_llama() -> Example:
    """The Llama of the measured half: 4 layers of width 512, 13 million parameters, 8 sequences of 64 tokens."""
    import torch

    from examples.llama import Llama, LlamaConfig

    config = LlamaConfig(d_model=512, d_ffn=1536, max_sequence=64)
    model = Llama(config)
    model.init_weights(seed=0)
    tokens = torch.randint(0, config.vocab_size, (8, config.max_sequence), generator=torch.Generator().manual_seed(0))
    return model, (tokens, tokens.roll(-1, 1))


MODELS = ("llama3_8b", "llama3_70b", "gpt2_xl", "vit_l", "moe")
MESHES = {"8": "dp=8", "64": "dp=8,tp=8"}
CASES = {f"{model}_{ranks}": Case(f"{model}_{ranks}", mesh) for model in MODELS for ranks, mesh in MESHES.items()}


def contest(factory: str, mesh: str, hardware: str, memory: str, *options: str) -> dict[str, Any] | str:
    """What ``autoshard compare`` says in JSON, or its error where no plan fits, or that it took too long."""
    command = [sys.executable, "-m", "autoshard", "compare", f"{__file__}:{factory}", "--mesh", mesh]
    command += ["--hardware", hardware, "--memory", memory, "--format", "json", *options]
    try:
        done = _run(command)
    except subprocess.TimeoutExpired:
        return f"not done in {TIMEOUT_S} s"
    refused = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    if done.returncode and refused:
        return refused[-1].removeprefix("error: ")
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)


def predicted(names: list[str], solver_s: float, overlap: bool, console: Console) -> bool:
    """Prints the table of the first half; whether no expert wins."""
    objective = "overlapped-step-time" if overlap else "step-time"
    table = Table(title=f"Predicted {objective}, dgx-h100, 80 GB a GPU, AdamW")
    for title in ("case", "mesh", "optimum", "gap", "memory", "best expert", "its step", "optimum / expert"):
        table.add_column(title, justify="left" if title in ("case", "mesh", "best expert") else "right")
    ratios, wins = [], False
    for name in names:
        case = CASES[name]
        console.print(f"planning {name}", style="dim")
        options = "--time-limit", f"{solver_s:g}", "--objective", objective
        found = contest(case.factory, case.mesh, "dgx-h100", "80GB", *options)
        if isinstance(found, str):
            table.add_row(name, case.mesh, "no plan", "", "", found.partition(";")[0], "", "")
            continue
        plans = {c["name"]: c["plan"] for c in found["contenders"] if c["plan"]}
        optimum, best = plans["optimum"], found["best"]
        cells = [f"{optimum['cost_ns'] / 1e6:.2f} ms", f"{optimum['gap']:.2%}", f"{_peak(optimum) / 1e9:.1f} GB"]
        if best is None:
            table.add_row(name, case.mesh, *cells, "none fits", "", "")
            continue
        ratios.append(found["ratio"])
        wins |= any(plan["cost_ns"] < optimum["cost_ns"] for plan in plans.values())
        expert = f"{plans[best]['cost_ns'] / 1e6:.2f} ms"
        table.add_row(name, case.mesh, *cells, best, expert, f"{found['ratio']:.4f}")
    console.print(table)
    if ratios:
        console.print(f"geometric mean of optimum / best expert: {statistics.geometric_mean(ratios):.4f}")
    return not wins


def _peak(summary: dict[str, Any]) -> float:
    return float(summary["memory"]["peak"]["size_bytes"])


def measured(console: Console, rounds: int) -> bool:
    """Prints the tables of the second half; whether no expert wins."""
    fine = True
    with tempfile.TemporaryDirectory() as folder:
        for mesh in ("dp=4", "dp=2,tp=2"):
            fine &= _race(f"one host, {mesh}", mesh, "cpu-gloo", Path(folder) / mesh, [], rounds, console)
        two_hosts = ROOT / "benchmarks" / "two_hosts.py"
        if not two_hosts.exists():
            console.print("two hosts: not run, there is no benchmarks/two_hosts.py")
            return fine
        shaped = [sys.executable, str(two_hosts), "--rate", RATE, "--"]
        profile = Path(folder) / "two-hosts.yaml"
        calibrate = [*shaped, "-m", "autoshard", "calibrate", "--mesh", "dp=2,tp=2", "-o", str(profile)]
        done = _run(calibrate)
        if done.returncode == UNABLE:
            console.print(f"two hosts: not run, {done.stderr.strip()}")
            return fine
        if done.returncode:
            raise SystemExit(f"{' '.join(calibrate)} failed:\n{done.stderr}")
        title = f"two hosts, {RATE} between them, dp=2,tp=2"
        return _race(title, "dp=2,tp=2", str(profile), Path(folder) / "two", shaped, rounds, console) and fine


def _race(title: str, mesh: str, hardware: str, folder: Path, shaped: list[str], rounds: int, console: Console) -> bool:
    """Plans, runs and prints one comparison; whether no expert that differs is faster by more than its spread."""
    budget = int(SHARE_OF_DDP * _ddp_peak(mesh, hardware))
    found = contest("measured_llama", mesh, hardware, str(budget), "--plans", str(folder))
    if isinstance(found, str):
        console.print(f"{title}: {found}")
        return False
    launcher = shaped or [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*launcher, __file__, "--worker", str(folder), "--rounds", str(rounds)]
    done = _run(command)
    if not (folder / "times.json").exists():
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    times: dict[str, list[float]] = json.loads((folder / "times.json").read_text())
    table = Table(title=f"{title}: measured step of {rounds} interleaved rounds, budget {budget / 1e6:.0f} MB a rank")
    for heading in ("plan", "predicted", "measured, median", "quartiles", "optimum / this"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    optimum = statistics.median(times["optimum"])
    plans = {_stem(c["name"]): c["plan"] for c in found["contenders"] if c["plan"]}
    for name, seconds in sorted(times.items(), key=lambda item: statistics.median(item[1])):
        low, middle, high = statistics.quantiles(seconds, n=4)
        spread = f"{low * 1e3:.1f} to {high * 1e3:.1f}"
        predicted_ms = f"{plans[name]['step_s'] * 1e3:.1f} ms"
        table.add_row(name, predicted_ms, f"{middle * 1e3:.1f} ms", spread, f"{optimum / middle:.3f}")
    console.print(table)
    low = statistics.quantiles(times["optimum"], n=4)[0]
    others = [_stem(c["name"]) for c in found["contenders"] if c["plan"] and c["first_difference"]]
    return all(low <= statistics.quantiles(times[name], n=4)[2] for name in others)


def _stem(name: str) -> str:
    """The file of a contender's plan without its ending (:attr:`autoshard.plans.Contender.file_name`)."""
    return name.replace("/", "-")


def _ddp_peak(mesh: str, hardware: str) -> int:
    """Bytes that plain data parallelism needs on a rank; found without a budget."""
    found = contest("measured_llama", mesh, hardware, "1TB")
    assert isinstance(found, dict)
    return int(next(_peak(c["plan"]) for c in found["contenders"] if c["name"] == "ddp"))


def run(folder: Path, rounds: int) -> None:
    """One rank: a step of every plan in turn; the first rank writes the seconds of each, the slowest rank's."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import autoshard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    plans = {path.stem: autoshard.read_plan(path) for path in sorted(folder.glob("*.yaml"))}
    first = next(iter(plans.values()))
    mesh = init_device_mesh("cpu", first.mesh.shape, mesh_dim_names=first.mesh.axes)
    steps = {}
    for name, plan in plans.items():
        model, batch = measured_llama()
        module = autoshard.parallelize(model, plan, mesh)
        shards = autoshard.shard_inputs(plan, mesh, *batch)
        steps[name] = (module, shards, torch.optim.AdamW(module.parameters(), lr=1e-4))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(-2, rounds):
        for name, (module, shards, optimizer) in steps.items():
            dist.barrier()
            started_s = time.perf_counter()
            module(*shards).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds = torch.tensor(time.perf_counter() - started_s)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number >= 0:
                times[name].append(float(seconds))
    if dist.get_rank() == 0:
        (folder / "times.part").write_text(json.dumps(times))
        (folder / "times.part").rename(folder / "times.json")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # interpreters with gloo threads sometimes abort as they end


def main() -> None:
    """Reads the arguments and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predicted", action="store_true", help="only the first half")
    parser.add_argument("--measured", action="store_true", help="only the second half")
    parser.add_argument("--overlap", action="store_true", help="the first half for steps in which communication hides")
    parser.add_argument("--case", action="append", choices=(*MODELS, *CASES), help="which to plan; may be repeated")
    parser.add_argument("--time-limit", type=float, default=SOLVER_S, help="seconds of the solver for each plan")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps of each plan that are timed")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run(arguments.worker, arguments.rounds)
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    fine = True
    if not arguments.measured:
        names = list(_chosen(arguments.case or list(MODELS)))
        fine &= predicted(names, arguments.time_limit, arguments.overlap, console)
    if not arguments.predicted:
        fine &= measured(console, arguments.rounds)
    sys.exit(0 if fine else 1)


def _chosen(given: list[str]) -> Iterator[str]:
    for name in given:
        yield from ([name] if name in CASES else [f"{name}_{ranks}" for ranks in MESHES])


if __name__ == "__main__":
    main()
