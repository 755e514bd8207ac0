"""Predicted against measured memory of every rank, on real gloo processes.

    python benchmarks/memory.py                  # the table: models, plans, optimizers, without and with a budget
    python benchmarks/memory.py --case llama     # one model
    python benchmarks/memory.py --json out.json  # the figures too

A row is a plan. Four processes run three training steps of it; the last is measured by a watch of every storage that
torch makes (``autoshard.measure_memory``). *Static* is parameters, gradients and the optimizer's state. Each figure is
the worst rank's; predictions are made for each rank apart. Exits with 1 where static memory is more than 5%, or a peak
more than 10% off, or where a plan with a budget holds more than it on some rank.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# the root in the place of this folder, where solver.py would be found as the package
sys.path[:] = [str(ROOT), *(path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent)]

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

import autoshard  # noqa: E402
from autoshard.capture import capture  # noqa: E402
from autoshard.planning.timeline import timeline  # noqa: E402
from autoshard.plans.units import format_bytes  # noqa: E402
from cost_models import optimizer_policy  # noqa: E402
from tests.distributed import cases  # noqa: E402
from tests.distributed.harness import run_ranks  # noqa: E402
from tests.distributed.parity import device_mesh_of  # noqa: E402

MOST_STATIC, MOST_PEAK = 0.05, 0.10
STEPS = 3
TIMEOUT_S = 240.0
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@dataclass(frozen=True)
class Case:
    """A model of the distributed tests, a mesh, an optimizer policy, and where its plan comes from: a baseline by its
    name, layouts that shard for certain, random ones, or the optimum.

    ``share`` is the budget as a share of what the plan without one holds; None for no budget.
    """

    model: str
    mesh: str
    optimizer: str
    source: str
    share: float | None = None


CASES = (
    Case("mlp", "dp=2,tp=2", "adamw", "sharded"),
    Case("mlp odd", "dp=2,tp=2", "sgd", "sharded"),
    Case("llama", "dp=2,tp=2", "adamw", "sharded"),
    Case("llama odd", "dp=2,tp=2", "adamw", "random"),
    Case("gpt2", "dp=2,tp=2", "adamw", "sharded"),
    Case("gpt2 odd", "dp=2,tp=2", "sgd-momentum", "random"),
    Case("moe", "dp=2,tp=2", "adamw", "random"),
    Case("conv", "dp=4", "sgd-momentum", "random"),
    Case("mlp", "dp=2,tp=2", "adamw", "optimum", 0.6),
    Case("gpt2 small", "dp=4", "adamw", "optimum", 0.7),
    Case("demo", "dp=4", "adamw", "ddp"),
    Case("demo", "dp=4", "adamw", "fsdp"),
    Case("demo", "dp=2,tp=2", "adamw", "fsdp+tp"),
    Case("demo", "dp=2,tp=2", "adamw", "optimum"),
    Case("demo", "dp=2,tp=2", "adamw", "optimum", 0.8),
)


@dataclass(frozen=True)
class Measured:
    """One rank: bytes predicted and measured."""

    static_predicted: int
    static_measured: int
    peak_predicted: int
    peak_measured: int


def plan_of(case: Case) -> autoshard.ShardingPlan:
    """The plan of a case."""
    if case.source == "sharded":
        return cases.sharded_plan(case.model, case.mesh)
    if case.source == "random":
        return cases.random_plan(case.model, case.mesh, seed=0)
    if case.source != "optimum":
        return cases.baseline_plan(case.model, case.mesh, case.source)
    model, args = cases.make(case.model)
    options: dict[str, Any] = {"mesh": case.mesh, "hardware": "cpu-gloo", "optimizer": case.optimizer}
    free = autoshard.plan(model, args, **options)
    if case.share is None or free.memory is None:
        return free
    budget = int(free.memory.peak.size_bytes * case.share)
    return autoshard.plan(model, args, memory=budget, time_limit_s=30.0, **options)


def train(case: Case, plan_text: str) -> Measured:
    """Trains on this rank and measures the last step."""
    plan = autoshard.parse_plan(plan_text)
    mesh = device_mesh_of(plan)
    model, args = cases.make(case.model)
    graph = capture(model, args)
    found = timeline(graph, plan, optimizer_policy(case.optimizer), tuple(mesh.get_coordinate() or ()))
    parallel = autoshard.parallelize(model, plan, mesh)
    optimizer = OPTIMIZERS[case.optimizer](parallel.parameters())
    held: list[torch.Tensor] = []
    for step in range(STEPS):
        shards = autoshard.shard_inputs(plan, mesh, *cases.batch(case.model, step))
        state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
        with autoshard.measure_memory(*parallel.parameters(), *parallel.buffers(), *state, *shards) as log:
            loss = parallel(*shards)
            loss = loss if loss.dim() == 0 else loss.sum()
            loss.backward()
            optimizer.step()
        gradients = [p.grad for p in parallel.parameters() if p.grad is not None]
        held = [*parallel.parameters(), *gradients, *state]
        optimizer.zero_grad()
    static = sum(found.static[kind] for kind in ("parameter", "gradient", "optimizer"))
    return Measured(static, size_of(held), found.peak.size_bytes, log.peak_bytes)


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors on this rank."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in local)}
    return sum(storages.values())


def error(predicted: int, measured: int) -> float:
    """Signed, relative to what was measured."""
    return predicted / measured - 1 if measured else 0.0


def main() -> None:
    """Reads the arguments, runs the cases, prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted({case.model for case in CASES}), help="one model only")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    table = Table(title="Memory of a rank, predicted and measured (4 gloo processes, the worst rank)")
    for heading in ("model", "mesh", "plan", "optimizer"):
        table.add_column(heading)
    for heading in ("static", "measured", "off", "peak", "measured", "off", "budget"):
        table.add_column(heading, justify="right")
    rows, failed = [], False
    for case in (case for case in CASES if arguments.case in (None, case.model)):
        plan = plan_of(case)
        ranks: list[Measured] = run_ranks(plan.mesh.size, train, case, autoshard.dump_plan(plan), timeout_s=TIMEOUT_S)
        static = max(ranks, key=lambda rank: abs(error(rank.static_predicted, rank.static_measured)))
        peak = max(ranks, key=lambda rank: abs(error(rank.peak_predicted, rank.peak_measured)))
        budget = plan.memory.budget_bytes if plan.memory else None
        off = error(static.static_predicted, static.static_measured), error(peak.peak_predicted, peak.peak_measured)
        over = budget is not None and max(rank.peak_measured for rank in ranks) > budget
        failed = failed or abs(off[0]) > MOST_STATIC or abs(off[1]) > MOST_PEAK or over
        sizes = (static.static_predicted, static.static_measured, peak.peak_predicted, peak.peak_measured)
        texts = [format_bytes(size) for size in sizes]
        table.add_row(
            *(case.model, case.mesh, case.source, case.optimizer),
            *(*texts[:2], f"{off[0]:+.2%}", *texts[2:], f"{off[1]:+.2%}"),
            "" if budget is None else format_bytes(budget) + (" exceeded" if over else ""),
        )
        rows.append({**asdict(case), "budget_bytes": budget, "ranks": [asdict(rank) for rank in ranks]})
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
