"""Applies a plan to a model on a real DeviceMesh. Needs no solver."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_flatten

from ..calls import rebuild_call
from ..capture import capture, input_names
from ..errors import PlanMismatchError
from ..plans import ShardingPlan
from .adapter import broadcast, device_of, group_names
from .match import check_graph, check_mesh
from .module import ParallelModule
from .program import LocalProgram, lower
from .shards import shard_parameters
from .verify import verify


def parallelize(
    model: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
) -> nn.Module:
    """Makes the module that runs a plan on this rank. Every rank calls it with the same plan.

    Args:
        model: the model the plan was made for. It is taken apart: its parameters become the DTensors of the result.
            Values are those of the mesh's first rank; parameters on the meta device stay there, as DTensors to be
            filled with ``to_empty`` and the model's own initialisation.
        plan: a plan for this model, these shapes and this mesh.
        mesh: the DeviceMesh of the job, with axis names.
        args, kwargs: example arguments of global shapes; only needed where the plan cannot describe the call (arguments
            nested in containers of the user's own).

    Returns:
        A module that trains: parameters are DTensors under their original FQNs, gradients arrive in their placements,
        and the collectives that run are exactly those of the plan.

    Raises:
        PlanMismatchError: the plan was made for another model, other shapes or another mesh; says which part differs.
        VerificationError: the lowered graph would not communicate as the plan says.
        CaptureError: the model is not one static graph.
    """
    check_mesh(plan, mesh)
    if args is None:
        args, kwargs = _example(plan)
    graph = capture(model, args, kwargs)
    check_graph(plan, graph)
    groups = group_names(mesh)
    coordinate = tuple(mesh.get_coordinate() or ())
    program = lower(graph, plan, coordinate, device_of(mesh), groups)
    verify(program, plan, groups)
    constants = _constants(model, args, kwargs or {})
    shard_parameters(model, plan, mesh)
    return ParallelModule(model, plan, mesh, program, constants, graph.out_spec, _seed(program, mesh))


def _seed(program: LocalProgram, mesh: DeviceMesh) -> int | None:
    """For a model that draws random numbers, a seed drawn by the first rank."""
    if not program.is_random:
        return None
    return int(broadcast(torch.randint(1 << 62, (1,)).to(device_of(mesh)), mesh).item())


def _example(plan: ShardingPlan) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if not plan.call:
        raise PlanMismatchError(
            "the plan does not say how the model is called (its arguments are nested in containers of your own); give "
            "parallelize example arguments too"
        )
    entries = {entry.name: entry for entry in plan.inputs}

    def tensor(name: str) -> torch.Tensor:
        if name not in entries:
            raise PlanMismatchError(f"the plan's call names the tensor {name!r}, which is not among its inputs")
        return torch.empty(entries[name].shape, dtype=getattr(torch, entries[name].dtype), device="meta")

    return rebuild_call(plan.call, tensor)


def _constants(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    leaves, _ = tree_flatten((args, kwargs))
    named = zip(input_names(model, args, kwargs), leaves)
    return {name: leaf for name, leaf in named if not isinstance(leaf, torch.Tensor)}
