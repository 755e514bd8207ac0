"""A job on the order of ranks of a hybrid mesh: the DeviceMesh it makes, and a plan that runs on it."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh

import autoshard
from autoshard.mesh import HybridMesh

from . import cases
from .harness import run_ranks
from .parity import full, relative, worst_parameter

# Two hosts of two: tp, the outer axis, stays inside a host, so its groups are ranks 0 and 1, 2 and 3.
HYBRID = HybridMesh(axes=("tp", "dp"), inner=(2, 1), outer=(1, 2))


def _train_on_hybrid_mesh() -> tuple[list[int], list[int], float, float]:
    mesh = DeviceMesh("cpu", HYBRID.ranks, mesh_dim_names=HYBRID.axes)
    groups = [torch.distributed.get_process_group_ranks(mesh.get_group(axis)) for axis in HYBRID.axes]
    model, reference = cases.make("mlp")[0], cases.make("mlp")[0]
    batch = cases.batch("mlp", 0)
    pins = ("x=tp:R dp:S(0)", "up.weight=tp:S(0) dp:R")
    parallel = autoshard.auto_parallelize(model, mesh, batch, hardware="cpu-gloo", pins=pins)
    loss = parallel(*autoshard.shard_inputs(parallel.plan, mesh, *batch))
    expected = reference(*batch)
    loss.backward()
    expected.backward()
    for module in (parallel, reference):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    return *groups, relative(full(loss.detach()), expected.detach()), worst_parameter(parallel, reference)


def test_a_plan_runs_on_the_order_of_ranks_of_a_hybrid_mesh():
    results = run_ranks(4, _train_on_hybrid_mesh)
    assert [result[0] for result in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [result[1] for result in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(loss <= 1e-5 and parameter <= 1e-5 for _, _, loss, parameter in results)
