"""What must be the same on every rank before anything is run: plan, code, torch, mesh; and then the model's tensors."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import PlanFileError
from ..plans import ShardingPlan, dump_plan, first_difference, parse_plan
from .agree import check_same
from .board import Board

_ADVICE = {
    "autoshard code": "install the same version of autoshard on all ranks",
    "torch version": "install the same version of torch on all ranks",
    "mesh": "make the same DeviceMesh on all ranks",
    "number of plans": "give all ranks the same plans",
    "random numbers": "give all ranks the same random=... of parallelize",
    "batches": "give all ranks the same batches=... of parallelize",
    "plan": "give all ranks the same plan file",
    "tensors": "build the model alike on all ranks, on the meta device or with values",
}


def check_same_start(
    board: Board,
    stage: str,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    plans: int,
    random: str,
    batches: tuple[int, ...],
) -> None:
    """Checks that all ranks run one plan, on one mesh, with the same code.

    Args:
        plans: how many plans this rank is to run.
        random: how it is to draw random numbers.
        batches: for which further sizes of the batch.

    Raises:
        JobError: on a rank that differs from the first one; says in what.
    """
    mine = {
        "autoshard code": code_digest(),
        "torch version": torch.__version__,
        "mesh": f"{_axes(mesh)} of the ranks {', '.join(map(str, mesh.mesh.flatten().tolist()))}",
        "number of plans": str(plans),
        "random numbers": random,
        "batches": ", ".join(map(str, batches)) or "none but those of the plans",
        "plan": f"sha256:{plan_digest(plan)[:16]}",
    }
    details = {"plan": lambda: _text(plan)}
    check_same(board, stage, mine, _ADVICE, details, lambda what, text: _plans_differ(plan, text, board))


def check_same_tensors(board: Board, stage: str, model: nn.Module) -> None:
    """Checks that the models of all ranks have values, or are on the meta device, for the same tensors.

    Raises:
        JobError: on a rank that differs from the first one.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    meta = [name for name, tensor in tensors if tensor.is_meta]
    digest = hashlib.sha256(repr(sorted(meta)).encode()).hexdigest()[:8]
    check_same(board, stage, {"tensors": f"{len(meta)} of {len(tensors)} on the meta device ({digest})"}, _ADVICE)


def plan_digest(plan: ShardingPlan) -> str:
    """A digest of all that a plan says, in hexadecimal."""
    return hashlib.sha256(repr(plan).encode()).hexdigest()


@cache
def code_digest() -> str:
    """A digest of the source files of this package, as they are on this rank's disk."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return f"sha256:{digest.hexdigest()[:16]}"


def _axes(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ("?",) * mesh.ndim
    return ",".join(f"{name}={size}" for name, size in zip(names, mesh.shape))


def _text(plan: ShardingPlan) -> str:
    """The plan for a rank that has another; nothing where it contradicts itself."""
    try:
        return dump_plan(plan)
    except PlanFileError:
        return ""


def _plans_differ(mine: ShardingPlan, text: str, board: Board) -> str:
    """Where two plans first differ, in words."""
    theirs = parse_plan(text, f"the plan of rank {board.ranks[0]}")
    found = first_difference(mine, theirs)
    if found is not None:
        return (
            f"first difference: {found.name} is {found.ours} on rank {board.rank} and {found.theirs} on rank "
            f"{board.ranks[0]}"
        )
    parts = [
        field.name
        for field in fields(mine)
        if field.compare and getattr(mine, field.name) != getattr(theirs, field.name)
    ]
    return f"they differ in {', '.join(parts)}"
