"""Trains a small Llama as real jobs do: dropout, precision, accumulation, clipping, warm-up, evaluation, checkpoints.

    autoshard plan examples/train_llama.py:student --mesh dp=4 --hardware cpu-gloo -o train.yaml
    autoshard plan examples/train_llama.py:student --evaluation --held-as train.yaml --mesh dp=4 \\
        --hardware cpu-gloo -o evaluate.yaml
    torchrun --nproc-per-node 4 examples/train_llama.py train.yaml evaluate.yaml --checkpoints runs/llama

Started again it goes on from the last checkpoint, on other plans, meshes and numbers of ranks as well. The walk through
it, and what differs from one process, is docs/training.md. ``--param-dtype bfloat16 --reduce-dtype float32`` of both
plans makes it a step in mixed precision; nothing here knows.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from llama import Block, Llama, LlamaConfig
from text import batches

CONFIG = LlamaConfig(n_layers=2, d_model=64, n_heads=4, n_kv_heads=2, d_ffn=192, max_sequence=64)
DROPOUT, BATCH, ACCUMULATED = 0.1, 8, 2
LEARNING_RATE, WARM_UP_STEPS, MOST_NORM = 3e-4, 5, 1.0
SEED = 0
TIMEOUT = timedelta(seconds=60)


class DroppingBlock(Block):
    """A block that drops some of what attention and feed-forward add."""

    def __init__(self, config: LlamaConfig, dropout: float) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        added: Tensor = self.dropout(self.feed_forward(self.ffn_norm(x)))
        return x + added


def student(dropout: float = DROPOUT) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """The model, and a batch: what ``autoshard plan`` asks for."""
    model = Llama(CONFIG)
    model.layers = nn.ModuleList(DroppingBlock(CONFIG, dropout) for _ in range(CONFIG.n_layers))
    model.init_weights(seed=SEED)
    shape = (BATCH, CONFIG.max_sequence)
    return model, (torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))


def certain() -> tuple[Llama, tuple[Tensor, Tensor]]:
    """The same without dropout: what it computes does not depend on how it is cut."""
    return student(dropout=0.0)


class Job:
    """What a checkpoint holds, and how: every rank writes its shards, into a folder that appears when it is whole.

    Args:
        folder: of the checkpoints, one each.
    """

    def __init__(self, model: nn.Module, folder: Path | None) -> None:
        self.model, self._folder = model, folder
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.warm_up = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=WARM_UP_STEPS)

    def save(self, step: int) -> None:
        """Writes what the job is after so many steps."""
        if self._folder is None:
            return
        model, optimizer = get_state_dict(self.model, self.optimizer)
        made = self._folder / f"unfinished-{step:06}"
        if dist.get_rank() == 0:
            shutil.rmtree(made, ignore_errors=True)  # of a job that was killed
        dist.barrier()  # no rank writes into a folder that is being removed
        dcp.save({"model": model, "optimizer": optimizer, "warm_up": self.warm_up.state_dict()}, checkpoint_id=made)
        if dist.get_rank() == 0:
            shutil.rmtree(self._place(step), ignore_errors=True)
            made.rename(self._place(step))

    def resume(self) -> int:
        """Reads the last checkpoint there is; returns how many steps have been done."""
        done = sorted(self._folder.glob("step-*")) if self._folder is not None else []
        if not done:
            return 0
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "warm_up": self.warm_up.state_dict()}
        dcp.load(state, checkpoint_id=done[-1])
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.warm_up.load_state_dict(state["warm_up"])
        return int(done[-1].name.removeprefix("step-"))

    def _place(self, step: int) -> Path:
        assert self._folder is not None
        return self._folder / f"step-{step:06}"


def number(value: Tensor) -> float:
    """A scalar that ranks may hold parts of; all of them call it."""
    value = value.detach()
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def train(job: Job, plans: Sequence[autoshard.ShardingPlan], mesh: DeviceMesh, options: argparse.Namespace) -> None:
    """Trains from the last checkpoint to the last step; rank 0 writes a line of JSON for each."""
    model, first = job.model, job.resume()
    autoshard.manual_seed(model, SEED, step=first * ACCUMULATED)
    size = {"batch": BATCH, "sequence": CONFIG.max_sequence}
    given = batches(options.steps * ACCUMULATED, **size, seed=SEED)
    kept_back = batches(1, **size, seed=SEED + 1)[0]

    for step in range(first, options.steps):
        model.train()
        loss = 0.0
        for tokens, targets in given[step * ACCUMULATED : (step + 1) * ACCUMULATED]:
            part = model(*autoshard.shard_inputs(plans[0], mesh, tokens, targets)) / ACCUMULATED
            part.backward()
            loss += number(part)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MOST_NORM)
        job.optimizer.step()
        job.warm_up.step()
        job.optimizer.zero_grad()
        said = {"step": step + 1, "loss": loss, "norm": number(norm)}
        if (step + 1) % options.every == 0:
            model.eval()
            with torch.no_grad():
                said["evaluation"] = number(model(*autoshard.shard_inputs(plans[-1], mesh, *kept_back)))
            job.save(step + 1)
        if dist.get_rank() == 0:
            print(json.dumps(said), flush=True)


def main() -> None:
    """Reads the arguments, and trains as one rank of a job that torchrun started."""
    parser = argparse.ArgumentParser(description="Trains a small Llama under plans.")
    parser.add_argument("plans", nargs="+", type=Path, help="the plan of the training step, and that of evaluation")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=5, help="steps from one evaluation and checkpoint to the next")
    parser.add_argument("--checkpoints", type=Path, help="the folder to go on from, and to write to")
    parser.add_argument("--no-dropout", action="store_true", help="for plans of the model without dropout")
    options = parser.parse_args()

    dist.init_process_group("gloo", timeout=TIMEOUT)
    plans = [autoshard.read_plan(path) for path in options.plans]
    mesh = init_device_mesh("cpu", plans[0].mesh.shape, mesh_dim_names=plans[0].mesh.axes)
    model, _ = certain() if options.no_dropout else student()
    job = Job(autoshard.parallelize(model, plans, mesh), options.checkpoints)
    train(job, plans, mesh, options)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort about one teardown in four


if __name__ == "__main__":
    main()
