"""One mesh of 8 x 8 GPUs in hosts of eight, laid over the hosts in three ways: which axis gets which network.

    python examples/two_level_mesh.py                # hosts as of dgx-h100; any profile: slow-hosts.yaml
    autoshard plan examples/llama.py:llama3_8b --mesh dp=2x4,tp=4x2 -o plan.yaml    # one of them, on the command line

Each takes about 12 CPU seconds. docs/search.md says what comes of it, and why.
"""

import sys

import autoshard
from autoshard import HybridMesh
from llama import llama3_8b  # the file beside this one

MESHES = {
    "tp inside hosts, dp across": HybridMesh(axes=("dp", "tp"), inner=(1, 8), outer=(8, 1)),
    "tp inside hosts, dp across, tp named first": HybridMesh(axes=("tp", "dp"), inner=(8, 1), outer=(1, 8)),
    "both in part": HybridMesh(axes=("dp", "tp"), inner=(4, 2), outer=(2, 4)),
}


def main(hardware: str = "dgx-h100") -> None:
    """Prints the step of the best plan on each, and what its axes run on."""
    model, args = llama3_8b()
    for name, mesh in MESHES.items():
        plan = autoshard.plan(model, args, mesh=mesh, hardware=hardware)
        axes = "; ".join(f"{axis} {network}" for axis, network in zip(plan.mesh.axes, plan.network))
        print(f"{plan.step_s * 1e3:7.1f} ms  {name}: {axes}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
