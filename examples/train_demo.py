"""Trains the demo Llama for 20 AdamW steps, in one process or in as many as the plan's mesh has ranks.

    python examples/train_demo.py --single out.json
    torchrun --nproc-per-node 4 examples/train_demo.py plan.yaml out.json

Both start from the same weights and see the same batches. The one process writes ``out.json``; each of many writes
``out.rankN.json``: the losses and the collectives that were intercepted while one step ran.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.plans import read_plan
from llama import DEMO, DEMO_BATCH, demo
from text import batches

STEPS = 20
LEARNING_RATE = 3e-4
"""At 1e-3 one batch in eight drives a token's residual so near zero that its norm magnifies rounding: then even two
runs in one process, whose first weights differ by half a unit in the last place, part by 5e-4 within 20 steps. At 3e-4
they differed by at most 3e-7 on eight choices of batches."""
SEED = 0
MEASURED_STEP = 1  # the second: whatever happens only once has happened
TIMEOUT = timedelta(seconds=60)


def rank_path(out: Path, rank: int) -> Path:
    """Where a rank writes its results when all of them were given ``out``."""
    return out.with_suffix(f".rank{rank}{out.suffix}")


def train(
    forward: Callable[[Tensor, Tensor], Tensor],
    parameters: Iterable[Tensor],
    around_step: Callable[[int], AbstractContextManager[None]],
) -> list[float]:
    """The loss of each step; ``around_step(i)`` is entered for all of step i: forward, backward and optimizer."""
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    losses = []
    for step, (tokens, targets) in enumerate(batches(STEPS, batch=DEMO_BATCH, sequence=DEMO.max_sequence, seed=SEED)):
        with around_step(step):
            optimizer.zero_grad()
            loss = forward(tokens, targets)
            loss.backward()
            optimizer.step()
        value = loss.detach()
        losses.append(float(value.full_tensor() if isinstance(value, DTensor) else value))
    return losses


def train_single() -> dict[str, Any]:
    """The results of training in this process alone."""
    model, _ = demo()
    return {"losses": train(model, model.parameters(), lambda step: nullcontext())}


def train_parallel(plan_path: Path) -> dict[str, Any]:
    """The results of this rank of a job that torchrun started."""
    plan = read_plan(plan_path)
    mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axes)
    model, _ = demo()
    parallel = autoshard.parallelize(model, plan, mesh)
    records: list[tuple[str, str, int]] = []

    @contextmanager
    def around_step(step: int) -> Iterator[None]:
        if step != MEASURED_STEP:
            yield
            return
        with autoshard.measure_collectives(mesh) as seen:
            yield
        records.extend(seen.records)

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = parallel(*autoshard.shard_inputs(plan, mesh, tokens, targets))
        return loss

    return {"losses": train(forward, parallel.parameters(), around_step), "records": records}


def main() -> None:
    """Reads the arguments, trains, writes the results."""
    parser = argparse.ArgumentParser(description="Trains the demo Llama for 20 steps.")
    parser.add_argument("--single", action="store_true", help="in this process alone, without a plan")
    parser.add_argument("plan", nargs="?", type=Path, help="the plan file (not with --single)")
    parser.add_argument("out", type=Path, help="where the results go")
    arguments = parser.parse_args()
    if arguments.single == (arguments.plan is not None):
        parser.error("give either --single or a plan file")
    if arguments.single:
        arguments.out.write_text(json.dumps(train_single()))
        return

    dist.init_process_group("gloo", timeout=TIMEOUT)
    out = rank_path(arguments.out, dist.get_rank())
    out.write_text(json.dumps(train_parallel(arguments.plan)))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads abort about one teardown in four; the results are on disk


if __name__ == "__main__":
    main()
