"""One set of parameters under plans for training, for evaluation and for a last, shorter batch, on real processes."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoshard

from . import cases
from .harness import caught, run_ranks
from .parity import device_mesh_of, full, planned_collectives, relative, worst_parameter

AXES = "dp=2,tp=2"
WIDTH = 16
LIMIT = 1e-4


class Net(nn.Module):
    """Gives its loss in training, and what it predicts in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu().sin()
        return self.head(x).square().mean() if self.training else self.head(x)

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        self.eval()
        found: Tensor = self(x)
        self.train()
        return found


def batch(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def plans() -> list[str]:
    """For 8 rows of training, for 6 of evaluation, for 4 of training; and one that holds parameters otherwise."""

    def plan(model: nn.Module, rows: int, **options: Any) -> autoshard.ShardingPlan:
        hardware = cases.slow_machine()
        return autoshard.plan(model, (batch(rows),), mesh=AXES, hardware=hardware, **options)

    training = plan(Net(), 8, pins=["x=dp:S(0)", "layers.*.weight=dp:S(0) tp:S(1)"])
    with torch.no_grad():
        evaluation = plan(Net().eval(), 6, held_as=training, pins=["x=dp:S(0)"])
    last = plan(Net(), 4, held_as=training, pins=["x=dp:S(0)"])
    other = plan(Net(), 4, pins=["layers.*.weight=dp:R tp:S(0)"])
    return [autoshard.dump_plan(made) for made in (training, evaluation, last, other)]


def _train(texts: list[str]) -> tuple[float, list[int], list[tuple[str, str]]]:
    """The largest difference from one process; peaks of training and of evaluation; and what is refused."""
    training, evaluation, last, other = (autoshard.parse_plan(text) for text in texts)
    mesh = device_mesh_of(training)
    held = caught(lambda: autoshard.parallelize(Net(), [training, other], mesh))
    reference = Net()
    parallel: Any = autoshard.parallelize(deepcopy(reference), [training, evaluation, last], mesh)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (parallel, reference)]
    worst, peaks = 0.0, []
    for step, plan in enumerate((training, training, last)):
        x = batch(plan.inputs[0].shape[0], step)
        shards = autoshard.shard_inputs(plan, mesh, x)
        with autoshard.measure_memory(*parallel.parameters(), *shards) as log:
            loss = parallel(*shards)
        peaks.append(log.peak_bytes - log.held_bytes)
        expected = reference(x)
        worst = max(worst, relative(loss, expected))
        for given, optimizer in zip((loss, expected), optimizers):
            given.backward()
            optimizer.step()
            optimizer.zero_grad()
        x = batch(6, 10 + step)
        shards = autoshard.shard_inputs(evaluation, mesh, x)
        with autoshard.measure_memory(*parallel.parameters(), *shards) as log:
            predicted = parallel.predict(*shards)
        worst = max(worst, relative(full(predicted), reference.predict(x)))
    worst = max(worst, worst_parameter(parallel, reference))
    mixed = training if dist.get_rank() else last
    differing = caught(lambda: parallel(*autoshard.shard_inputs(mixed, mesh, batch(mixed.inputs[0].shape[0]))))
    unplanned = caught(lambda: parallel(batch(5)))
    return worst, [peaks[0], log.peak_bytes - log.held_bytes], [held, differing, unplanned]


def test_training_evaluation_and_a_last_batch_are_those_of_one_process() -> None:
    for rank, (worst, (trained, evaluated), refused) in enumerate(run_ranks(4, _train, plans(), timeout_s=120.0)):
        assert worst <= LIMIT
        assert evaluated < trained
        (_, held), (_, differing), (_, unplanned) = refused
        assert "plan 2 of 2 holds" in held and "in it and dp:S(0) tp:S(1) in the first" in held
        assert f"rank {rank} is called with what plan {1 if rank else 3} of 3 was made for" in differing
        assert "none of the 3 plans" in unplanned and "--held-as PLAN.yaml" in unplanned


def _train_other_sizes(text: str) -> tuple[float, list[bool], list[tuple[str, str]]]:
    """The largest difference from one process; whether what was sent is what the layouts need; and what is refused."""
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    differing = caught(lambda: autoshard.parallelize(Net(), plan, mesh, batches=[6] if dist.get_rank() else [4]))
    single = caught(lambda: autoshard.parallelize(Net(), plan, mesh, batches=[1]))
    wrong = caught(lambda: autoshard.parallelize(Net(), plan, mesh, batches=[0]))
    reference = Net()
    parallel: Any = autoshard.parallelize(deepcopy(reference), plan, mesh, batches=[5, 8, 2])
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (parallel, reference)]
    worst, as_needed = 0.0, []
    for step, rows in enumerate((8, 5, 8, 2, 5)):
        x = batch(rows, step)
        shards = autoshard.shard_inputs(plan, mesh, x, batch=rows)
        with autoshard.measure_collectives(mesh) as log:
            loss = parallel(*shards)
            loss.backward()
        expected = reference(x)
        expected.backward()
        worst = max(worst, relative(loss, expected))
        served = next(p.plan for p in parallel._autoshard.plans if p.plan.inputs[0].shape[0] == rows)
        found, planned = Counter(log.records), planned_collectives(served)
        beside = {kind for kind, *_ in found - planned}  # the ranks compare which plan they run
        as_needed.append(not planned - found and beside == {"c10d.allreduce_.default"})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    worst = max(worst, worst_parameter(parallel, reference))
    return worst, as_needed, [differing, single, wrong, caught(lambda: parallel(batch(7)))]


def test_one_plan_serves_batches_of_other_sizes() -> None:
    for rank, (worst, as_needed, refused) in enumerate(run_ranks(4, _train_other_sizes, plans()[0], timeout_s=120.0)):
        assert worst <= LIMIT
        assert all(as_needed)
        (_, differing), (kind, single), (_, wrong), (_, unplanned) = refused
        assert (
            kind in ("PlanMismatchError", "JobError") and "a batch of 1 cannot have the layouts of the plan" in single
        )
        assert "batches" in differing and ("give all ranks the same batches=" in differing or rank != 3)
        assert "batches names the size 0" in wrong
        assert "none of the 3 plans" in unplanned and "batches=[...]" in unplanned
