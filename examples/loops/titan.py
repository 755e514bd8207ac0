"""A loop as torchtitan writes it: on the meta device, parallelized, made real, initialised, checkpointed, resumed.

autoshard plan examples/llama.py:demo --mesh dp=2,tp=2 --hardware cpu-gloo -o plan.yaml
torchrun --nproc-per-node 4 examples/loops/titan.py plan.yaml checkpoints
"""

import os
import sys
from concurrent.futures import Future
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import autoshard

sys.path.insert(0, str(Path(__file__).parents[1]))
from llama import DEMO, DEMO_BATCH, Llama
from text import batches

STEPS = 4
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def main() -> None:
    """Trains half of the steps, then all that are left with a model and an optimizer made from the checkpoint."""
    plan, folder = autoshard.read_plan(Path(sys.argv[1])), Path(sys.argv[2])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axes)
    given = batches(STEPS, batch=DEMO_BATCH, sequence=DEMO.max_sequence, seed=0)
    losses = []
    for first in (0, STEPS // 2):
        with torch.device("meta"):
            model = Llama(DEMO)
        autoshard.parallelize(model, plan, mesh)
        model.to_empty(device="cpu")
        model.init_weights(seed=0)  # of one process, one parameter at a time
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        if first:
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)}
            dcp.load(state, checkpoint_id=folder)
            model.load_state_dict(state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
        for tokens, targets in given[first : first + STEPS // 2]:
            loss = model(*autoshard.shard_inputs(plan, mesh, tokens, targets))
            loss.backward()
            norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            clip_grads_with_norm_(model.parameters(), 1.0, norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        if not first:
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)}
            saving = dcp.async_save(state, checkpoint_id=folder)
            assert isinstance(saving, Future)  # the other kind is for processes of its own
            saving.result()  # before the next save, or the end
    if dist.get_rank() == 0:
        print("losses", *losses, flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads abort about one teardown in four


if __name__ == "__main__":
    main()
