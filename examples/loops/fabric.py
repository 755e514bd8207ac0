"""Lightning Fabric trains the Llama of the examples under a plan.

    autoshard plan examples/llama.py:demo --mesh data_parallel=2,tensor_parallel=2 --hardware cpu-gloo -o plan.yaml
    torchrun --nproc-per-node 4 examples/loops/fabric.py plan.yaml

The axes of the plan have the names that Lightning gives those of its mesh.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader, TensorDataset

import autoshard

sys.path.insert(0, str(Path(__file__).parents[1]))
from llama import DEMO, DEMO_BATCH, demo
from text import batches

STEPS = 4


def main() -> None:
    """Trains as one rank of a job that torchrun started; the first rank prints losses."""
    plan = autoshard.read_plan(Path(sys.argv[1]))
    sizes = dict(zip(("data_parallel_size", "tensor_parallel_size"), plan.mesh.shape, strict=True))
    strategy = ModelParallelStrategy(lambda model, mesh: autoshard.parallelize(model, plan, mesh), **sizes)
    fabric = Fabric(accelerator="cpu", devices=plan.mesh.size, strategy=strategy)
    fabric.launch()
    model = fabric.setup(demo()[0])
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-4))

    mesh = strategy.device_mesh
    given = batches(STEPS, batch=DEMO_BATCH, sequence=DEMO.max_sequence, seed=0)
    rows = TensorDataset(*(torch.cat(tensors) for tensors in zip(*given, strict=True)))
    sampler = autoshard.sampler(plan, mesh, rows, shuffle=False)
    losses = []
    for tokens, targets in DataLoader(rows, DEMO_BATCH // sampler.num_replicas, sampler=sampler):
        loss = model(*autoshard.shard_inputs(plan, mesh, tokens, targets))
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    if fabric.is_global_zero:
        print("losses", *losses, flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads abort about one teardown in four


if __name__ == "__main__":
    main()
