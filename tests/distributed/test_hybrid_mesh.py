"""A job on the order of ranks of a hybrid mesh: the DeviceMesh it makes, and a plan that runs on it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh

import autoshard
from autoshard.errors import MeshError, PlanMismatchError
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


def _gathers_over_both(ranks: tuple[tuple[int, ...], ...]) -> tuple[float, float, set[str], list[str]]:
    """Trains with parameters that two axes cut, on a mesh that lists its ranks so: how far it is from one process, what
    runs over both axes, and why a plan for ranks in order is refused, and one that does not know its order.
    """
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))
    model, reference = cases.make("mlp")[0], cases.make("mlp")[0]
    batch = cases.batch("mlp", 0)
    asked = {"hardware": cases.slow_starts(), "constraints": ("family a=fsdp", "family b=fsdp")}
    parallel = autoshard.auto_parallelize(model, mesh, batch, **asked)
    with autoshard.measure_collectives(mesh) as seen:
        loss = parallel(*autoshard.shard_inputs(parallel.plan, mesh, *batch))
        loss.backward()
    expected = reference(*batch)
    expected.backward()
    for module in (parallel, reference):
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    plain = autoshard.plan(cases.make("mlp")[0], batch, mesh="a=2,b=2", **asked)
    refused = [_refusal(plan, mesh) for plan in (plain, replace(plain, network=()))]
    kinds = {f"{kind} {link}" for kind, link, _ in seen.records if link == "a+b"}
    return relative(full(loss.detach()), expected.detach()), worst_parameter(parallel, reference), kinds, refused


def _refusal(plan: autoshard.ShardingPlan, mesh: DeviceMesh) -> str:
    """Why the plan of an MLP is not applied on a mesh; nothing where it is."""
    try:
        autoshard.parallelize(cases.make("mlp")[0], plan, mesh)
    except (MeshError, PlanMismatchError) as error:
        return str(error)
    return ""


def test_what_two_axes_cut_is_gathered_over_both_at_once_where_their_ranks_rise():
    for loss, parameter, kinds, refused in run_ranks(4, _gathers_over_both, ((0, 1), (2, 3))):
        assert loss <= 1e-5 and parameter <= 1e-5 and refused == ["", ""]
        assert {"all_gather a+b", "reduce_scatter a+b"} <= kinds


def test_where_their_ranks_do_not_rise_axis_by_axis_and_other_plans_are_refused():
    """A process group counts its ranks in rising order: blocks would come in the order 0, 2, 1, 3."""
    for loss, parameter, kinds, refused in run_ranks(4, _gathers_over_both, ((0, 2), (1, 3))):
        assert loss <= 1e-5 and parameter <= 1e-5
        assert not any(kind.startswith(("all_gather", "reduce_scatter")) for kind in kinds)
        assert "at position 1 of a=2,b=2 it has rank 1, this job rank 2" in refused[0]
        # a plan that does not say which order it was made for is refused where it would be wrong
        assert "along a+b the ranks of the DeviceMesh do not rise" in refused[1]
