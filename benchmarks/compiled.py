"""Steps of a parallel module under ``torch.compile(fullgraph=True)`` against those without, in one run on gloo ranks.

    python benchmarks/compiled.py                    # the small Llama of examples/train_llama.py, 2 ranks

A step is forward, backward and AdamW's. The two take turns; the slowest rank's seconds count, and a ratio is that of
two steps of one round. Printed are the medians, the median of the ratios with quartiles, and what the first compiled
step took, which compiles.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

import autoshard
import train_llama
from text import batches

RANKS, ROUNDS, WARM = 2, 30, 3


def step_of(compiler: str) -> Callable[[], float]:
    """A training step of the example without dropout; ``compiler`` is a backend of ``torch.compile``, or empty."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model, example = train_llama.certain()
    parallel = autoshard.auto_parallelize(model, mesh, example)
    call = torch.compile(parallel, fullgraph=True, backend=compiler) if compiler else parallel
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=train_llama.LEARNING_RATE)
    batch = batches(1, batch=train_llama.BATCH, sequence=train_llama.CONFIG.max_sequence, seed=0)[0]
    shards = autoshard.shard_inputs(autoshard.plan_of(parallel), mesh, *batch)

    def step() -> float:
        dist.barrier()
        started_s = time.perf_counter()
        call(*shards).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = torch.tensor(time.perf_counter() - started_s)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return float(seconds)

    return step


def work(compiler: str, rounds: int) -> NoReturn:
    """One rank; the first one prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    eager, compiled = step_of(""), step_of(compiler)
    first_s = compiled()
    pairs = [(eager(), compiled()) for _ in range(WARM + rounds)][WARM:]
    low, middle, high = statistics.quantiles([b / a for a, b in pairs], n=4)
    before_ms, after_ms = (statistics.median(each) * 1e3 for each in zip(*pairs))
    if dist.get_rank() == 0:
        print(f"eager {before_ms:.1f} ms, {compiler} {after_ms:.1f} ms, first step {first_s:.0f} s")
        print(f"compiled over eager: {middle:.2f}, quartiles {low:.2f} to {high:.2f}, {rounds} rounds", flush=True)
    dist.barrier()
    os._exit(0)  # interpreters with gloo threads sometimes abort as they end


def main() -> int:
    """Reads the arguments; starts the ranks, or is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", help="of torch.compile (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="steps of each that are timed")
    parser.add_argument("--ranks", type=int, default=RANKS)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        work(arguments.backend, arguments.rounds)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks))
    environment = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ
    return subprocess.run([*torchrun, __file__, *sys.argv[1:]], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
