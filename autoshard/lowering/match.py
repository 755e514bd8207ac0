"""Checks that a plan was made for this mesh, this model and these shapes, and says which part differs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..capture import CapturedGraph, TensorMeta
from ..errors import MeshError, PlanMismatchError
from ..layout import format_layout
from ..mesh import Mesh
from ..plans import ShardingPlan, TensorEntry
from ..precision import AS_IT_IS
from .local_program import LocalProgram


def check_device_mesh(mesh: object) -> None:
    """Checks that a mesh is that of a job.

    Raises:
        MeshError: it is the text of one, or something else.
    """
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"the mesh of a job is a DeviceMesh, got {mesh!r:.40}; make one on every rank: "
            "init_device_mesh(device, shape, mesh_dim_names=axes)"
        )


def mesh_of(mesh: DeviceMesh) -> Mesh:
    """The axes and sizes of a DeviceMesh, and its order of ranks.

    Raises:
        MeshError: it is none, or its axes have no names.
    """
    check_device_mesh(mesh)
    if not mesh.mesh_dim_names:
        raise MeshError("the DeviceMesh has no axis names; make it with init_device_mesh(..., mesh_dim_names=(...))")
    order = tuple(torch.argsort(torch.argsort(mesh.mesh.flatten())).tolist())  # of a part of the job's ranks, too
    shape = tuple(int(size) for size in mesh.shape)
    return Mesh(tuple(mesh.mesh_dim_names), shape, () if order == tuple(range(len(order))) else order)


def check_mesh(plan: ShardingPlan, mesh: DeviceMesh) -> None:
    """Checks that the job has the mesh the plan was made for, its ranks in the order that the plan was priced for.

    Raises:
        PlanMismatchError: it has another.
    """
    found = mesh_of(mesh)
    if found != plan.mesh:
        raise PlanMismatchError(
            f"the plan was made for the mesh {plan.mesh} ({plan.mesh.size} ranks); this job has {found} "
            f"({found.size} ranks): make another plan, or start the job on that mesh"
        )
    if plan.network and found.order != plan.mesh.order:
        position, planned, here = _first_other(plan.mesh, found)
        raise PlanMismatchError(
            "the plan was made for another order of ranks than this DeviceMesh has, so that its axes run on other "
            f"links: at position {position} of {plan.mesh} it has rank {planned}, this job rank {here}; start the job "
            "on DeviceMesh(device, plan.mesh.ranks, mesh_dim_names=plan.mesh.axes), or "
            "make the plan for the order of the job (autoshard.HybridMesh)"
        )


def _first_other(*meshes: Mesh) -> tuple[int, int, int]:
    """The first position at which two meshes of one size have different ranks, and those."""
    orders = (mesh.order or tuple(range(mesh.size)) for mesh in meshes)
    return next((k, a, b) for k, (a, b) in enumerate(zip(*orders, strict=True)) if a != b)


def check_order(plan: ShardingPlan, mesh: DeviceMesh) -> None:
    """Checks that the ranks of each group that gathers, scatters or exchanges blocks rise in the order of the mesh: a
    process group counts them so, however the mesh lists them.

    Raises:
        MeshError: they do not.
    """
    found = mesh_of(mesh)
    for link in sorted({c.axis for _, c in plan.collectives() if c.kind != "all_reduce"}, key=found.indices):
        if not found.is_rising(found.indices(link)):
            raise MeshError(
                f"along {link} the ranks of the DeviceMesh do not rise, so that torch's process groups count them in "
                "another order than the mesh; list the ranks of each group in rising order, or plan for the mesh with "
                "this order (HybridMesh)"
            )


def check_graph(plan: ShardingPlan, graph: CapturedGraph) -> None:
    """Checks that a captured graph is the one the plan was made for, and that the plan has an entry for everything in
    it and for nothing else: a plan that was edited may name the right graph and list another.

    Raises:
        PlanMismatchError: parameters, buffers, inputs, outputs or operators differ; the message names the first
            difference.
    """
    if plan.precision != graph.precision:
        raise PlanMismatchError(
            f"the plan was made for {plan.precision}; the model was captured with {graph.precision}: capture it with "
            "the plan's precision"
        )
    for kind, entries in (
        ("parameter", plan.parameters),
        ("buffer", plan.buffers),
        ("input", plan.inputs),
        ("output", plan.outputs),
    ):
        _check_tensors(kind, entries, _tensors(graph, kind))
    planned = {entry.name: entry.phase for entry in plan.operators}
    found = {node.name: node for _, node in graph.of_kind("operator")}
    for name in sorted(found.keys() - planned.keys())[:1]:
        source = found[name].source
        raise PlanMismatchError(_again(f"the model has the operator {name} ({source}), which the plan does not have"))
    for name in sorted(planned.keys() - found.keys())[:1]:
        raise PlanMismatchError(_again(f"the plan has the operator {name}, which the model does not have"))
    if plan.fingerprint != graph.fingerprint:
        under = "" if plan.precision == AS_IT_IS else f" (captured as the plan says: {plan.precision})"
        raise PlanMismatchError(
            _again(f"operators have the same names as in the plan, but other arguments, dtypes or connections{under}")
        )
    for name, node in found.items():
        if planned[name] != node.phase:
            raise PlanMismatchError(
                _again(f"the operator {name} is one of the {node.phase}, not of the {planned[name]}")
            )
    run = [entry.name for entry in plan.execution]
    order = sorted(found, key=lambda name: found[name].phase != "forward")
    if run and run != order:
        name, other = next((a, b) for a, b in zip_longest(run, order, fillvalue="nothing") if a != b)
        raise PlanMismatchError(_again(f"the plan runs {name} where the model runs {other}"))


def check_held_alike(plans: Sequence[ShardingPlan], programs: Sequence[LocalProgram]) -> None:
    """Checks that one set of parameters and buffers serves several plans.

    Args:
        programs: those of the plans. A tensor that one does not take, it may list in any layout.

    Raises:
        PlanMismatchError: a plan holds one otherwise than the first; names the first three.
    """
    first = {entry.name: entry for entry in (*plans[0].parameters, *plans[0].buffers)}
    for number, (plan, program) in enumerate(zip(plans, programs), 1):
        held = {e.name: e for e in (*plan.parameters, *plan.buffers) if e.name in program.arguments}
        differing = [name for name, entry in held.items() if name in first and first[name].layout != entry.layout]
        said = [
            f"{name} is {format_layout(held[name].layout, plan.mesh)} in it and "
            f"{format_layout(first[name].layout, plan.mesh)} in the first"
            for name in differing[:3]
        ]
        if said:
            raise PlanMismatchError(
                f"plan {number} of {len(plans)} holds {len(differing)} tensors otherwise than the first, and a module "
                f"holds each once: {'; '.join(said)}. Make it again with autoshard.plan(..., held_as=first), or "
                "autoshard plan ... --held-as FIRST.yaml"
            )


def _tensors(graph: CapturedGraph, kind: str) -> dict[str, TensorMeta]:
    if kind == "output":
        return {f"output.{k}": graph.meta(ref) for k, ref in enumerate(graph.outputs) if ref is not None}
    found = {node.name: node.outputs[0] for _, node in graph.of_kind(kind)}  # type: ignore[arg-type]
    return found | (dict(graph.unused) if kind == "parameter" else {})  # type: ignore[return-value]


def _check_tensors(kind: str, entries: tuple[TensorEntry, ...], found: dict[str, TensorMeta]) -> None:
    planned = {entry.name: entry for entry in entries}
    if len(planned) != len(entries):
        raise PlanMismatchError(_again(f"the plan names a {kind} twice"))
    for name in sorted(planned.keys() ^ found.keys())[:1]:
        owner, other = ("the plan", "the model") if name in planned else ("the model", "the plan")
        raise PlanMismatchError(_again(f"{owner} has the {kind} {name}, which {other} does not have"))
    for name, entry in planned.items():
        meta = found[name]
        if (entry.shape, entry.dtype) != (meta.shape, _dtype(meta.dtype)):
            said = f"{name} is {entry.dtype}{list(entry.shape)} in the plan and {_dtype(meta.dtype)}{list(meta.shape)}"
            if kind == "input":
                raise PlanMismatchError(
                    f"the plan was made for other arguments: the input {said} in the example arguments given here; "
                    "give those of the plan, a full batch and the same on every rank, or make a plan for these"
                )
            raise PlanMismatchError(_again(f"the {kind} {said} in the model"))
    if kind in ("input", "output") and list(planned) != list(found):
        raise PlanMismatchError(
            _again(
                f"the {kind}s are {', '.join(planned)} in the plan and {', '.join(found)} in the model, in this order"
            )
        )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _again(difference: str) -> str:
    return f"the plan was made for another model: {difference}; make the plan again for this model"
