"""CPU seconds of ``parallelize`` on one rank of a large job: the first start, and the next ones.

    python benchmarks/startup.py                     # Llama-3-8B on one of 64 ranks

Each start is a process of its own: rank 0 of a fake process group, the model on the meta device, its plan from a file.
They share a cache folder, which the first finds empty. Printed are the CPU seconds until ``parallelize`` (imports, plan
file, model) and those of ``parallelize``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import autoshard
from autoshard.cli.model_factory import load_factory


def start(model: str, plan_file: str) -> None:
    """One start; prints both figures."""
    plan = autoshard.read_plan(plan_file)
    dist.init_process_group("fake", rank=0, world_size=plan.mesh.size, store=FakeStore())
    mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axes)
    module = load_factory(model)[0]
    before_s = time.process_time()
    autoshard.parallelize(module, plan, mesh)
    print(f"{before_s:.1f} {time.process_time() - before_s:.1f}")


def main() -> None:
    """Plans, starts so many times, and prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="examples/llama.py:llama3_8b")
    parser.add_argument("--mesh", default="dp=8,tp=8")
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plan:
        return start(args.model, args.plan)
    with tempfile.TemporaryDirectory() as folder:
        plan_file = f"{folder}/plan.yaml"
        command = [sys.executable, "-m", "autoshard", "plan", args.model, "--mesh", args.mesh, "-o", plan_file]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        environment = os.environ | {"AUTOSHARD_CACHE": f"{folder}/cache"}
        print("start  before  parallelize  (CPU s)")
        for number in range(1, args.starts + 1):
            command = [sys.executable, __file__, "--model", args.model, "--plan", plan_file]
            found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            before_s, parallelize_s = found.stdout.split()[-2:]
            print(f"{number:5}  {before_s:>6}  {parallelize_s:>11}")


if __name__ == "__main__":
    main()
