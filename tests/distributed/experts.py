"""torch's own data, sharded and tensor parallelism on real processes, and what they communicate in one step.

Nothing here reads a plan: collectives are intercepted at dispatch, in torch's own names.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autoshard.layout import largest_local_shape
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan, TensorEntry

Bytes = Counter[tuple[str, str]]
"""Bytes by (kind, mesh axis); of a collective the larger of a rank's input and output buffer."""

_KINDS = {
    "allreduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}
_NO_TRAFFIC = {"wait_tensor", "_wrap_tensor_autograd"}


class Watch(TorchDispatchMode):
    """Adds up the bytes of every collective of this rank, whichever of torch's interfaces it goes through."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.seen: Bytes = Counter()
        self._axes = {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names or ()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in _NO_TRAFFIC:
            leaves = tree_leaves((args, kwargs, result))
            sizes = [leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor)]
            kind = _KINDS.get(func._opname, func._opname)
            self.seen[kind, self._axis(leaves)] += max(sizes)
        return result

    def _axis(self, leaves: list[Any]) -> str:
        for leaf in leaves:
            if isinstance(leaf, torch.ScriptObject):
                try:
                    return self._axes[dist.ProcessGroup.unbox(leaf).group_name]
                except (RuntimeError, KeyError):
                    continue
            if isinstance(leaf, str) and leaf in self._axes:
                return self._axes[leaf]
        return "?"


def step_of(scheme: str, axes: str, make: Any, batch: tuple[torch.Tensor, ...]) -> tuple[Bytes, float]:
    """The bytes of one step of torch's own scheme on this rank, and the mean of the ranks' losses.

    Args:
        make: gives the model; the same on every rank.
        batch: the full batch; data parallel ranks take their rows.
    """
    shape = Mesh.parse(axes)
    mesh = init_device_mesh("cpu", shape.shape, mesh_dim_names=shape.axes)
    model = APPLY[scheme](make(), mesh)
    data = [axis for axis, part in zip(shape.axes, _parts(scheme, shape)) if part in ("ddp", "fsdp")]
    rows = batch
    for axis in data:
        rows = tuple(x.chunk(mesh[axis].size())[mesh[axis].get_local_rank()] for x in rows)
    for _ in range(2):  # what is made once: buffers of first use, DDP's second order of buckets
        model(*rows).backward()
        model.zero_grad()
    with Watch(mesh) as watch:
        loss = model(*rows)
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return watch.seen, float(total) / dist.get_world_size()


def _parts(scheme: str, mesh: Mesh) -> tuple[str, ...]:
    parts = scheme.split("+")
    return (*(parts[0],) * (mesh.ndim - 1), parts[-1]) if scheme != "hsdp" else ("ddp", "fsdp")


def _ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    # nothing changes the buffers of these models; DDP would send them from the first rank at every step
    return DistributedDataParallel(model, process_group=mesh.get_group(0), broadcast_buffers=False)


def _fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _tensor(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """Megatron's plan for the blocks of examples/vit.py; all outside of them is whole on every rank."""
    between = Shard(1) if sequence else Replicate()
    whole = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    row = RowwiseParallel(output_layouts=between)
    for block in model.layers:  # type: ignore[union-attr]
        plan: dict[str, Any] = {"attention": whole, "attention.project": row, "mlp": whole, "mlp.down": row}
        plan |= {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
        plan |= {"mlp.up": ColwiseParallel()}
        if sequence:
            plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        parallelize_module(block, mesh, plan)
        block.attention.n_heads //= mesh.size()
    if sequence:
        ends: dict[str, Any] = {
            "layers.0": PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=True
            ),
            "norm": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),), use_local_output=True
            ),
        }
        parallelize_module(model, mesh, ends)
    return model


def _both(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    outer, inner = mesh.mesh_dim_names or ()
    return _fsdp(_tensor(model, mesh[inner], sequence), mesh[outer])


APPLY: dict[str, Any] = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "hsdp": _fsdp,
    "tp": lambda model, mesh: _tensor(model, mesh, False),
    "sp": lambda model, mesh: _tensor(model, mesh, True),
    "fsdp+tp": lambda model, mesh: _both(model, mesh, False),
    "fsdp+sp": lambda model, mesh: _both(model, mesh, True),
}


SCALAR_BYTES = 8


@dataclass(frozen=True)
class Reason:
    """Bytes that a plan moves more than torch (fewer, if negative), and why."""

    kind: str
    axis: str
    size_bytes: int
    why: str


def bytes_of(plan: ShardingPlan) -> Bytes:
    """The bytes of a plan's step on one rank, by kind and axis."""
    total: Bytes = Counter()
    for _, collective in plan.collectives():
        total[collective.kind, collective.axis] += collective.size_bytes
    return total


def reasons(plan: ShardingPlan, scheme: str) -> list[Reason]:
    """Why a plan of a scheme moves other bytes than torch's own, as far as it does."""
    found = []
    for redistribution in plan.redistributions:
        for collective in redistribution.collectives:
            if collective.size_bytes <= SCALAR_BYTES:
                why = "the loss is the mean of the whole batch; torch's is that of a rank's rows"
                found.append(Reason("all_reduce", collective.axis, collective.size_bytes, why))
            if scheme == "sp" and collective.kind == "all_reduce" and "_norm/" in redistribution.tensor:
                why = "gradients of norms arrive reduced; torch's stay partial until somebody reads them"
                found.append(Reason("all_reduce", collective.axis, collective.size_bytes, why))
            if scheme == "fsdp+sp" and collective.kind == "all_reduce" and "_norm/" in redistribution.tensor:
                why = "gradients of norms are reduced over tp once they are cut over dp; torch reduces them before"
                less = collective.size_bytes * (plan.mesh.shape[0] - 1)
                found.append(Reason("all_reduce", collective.axis, -less, why))
    if scheme.endswith("sp"):
        axis = plan.mesh.axes[-1]
        stream = max(c.size_bytes for _, c in plan.collectives() if (c.kind, c.axis) == ("reduce_scatter", axis))
        why = "torch cuts the gradient that enters the last layer and gathers it again; the plan reads it whole"
        found.append(Reason("all_gather", axis, -stream, why))
    for axis, part in zip(plan.mesh.axes, _parts(scheme, plan.mesh)):
        if part == "fsdp":
            found += _fsdp_reasons(plan, axis)
    return found


def _fsdp_reasons(plan: ShardingPlan, axis: str) -> Iterator[Reason]:
    """FSDP2 handles the parameters of a module together, and cuts them all."""
    index = plan.mesh.index(axis)
    read = {r.tensor for r in plan.redistributions if r.phase == "backward"}
    for entry in plan.parameters:
        size = _gathered_bytes(entry, plan.mesh, axis)
        if entry.layout[index].kind != "S":
            why = "a bias that tp cuts stays whole over fsdp's axis: only the inner axis of a dim can be gathered"
            gathers = 2 if entry.name.startswith("layers.") else 1
            yield Reason("all_gather", axis, -gathers * size, why)
            yield Reason("reduce_scatter", axis, -size, why)
            yield Reason("all_reduce", axis, size, why)
        elif entry.name.startswith("layers.") and entry.name not in read:
            yield Reason("all_gather", axis, -size, "torch gathers biases again, which no backward reads")
        elif not entry.name.startswith("layers.") and entry.name in read:
            yield Reason("all_gather", axis, size, "torch keeps the root module's parameters until the backward")


def _gathered_bytes(entry: TensorEntry, mesh: Mesh, axis: str) -> int:
    """Bytes of a parameter on one rank once it is whole along an axis, padded to equal blocks."""
    index = mesh.index(axis)
    shard = list(largest_local_shape(entry.shape, entry.layout, mesh))
    if entry.layout[index].kind == "S":
        shard[entry.layout[index].dim] *= mesh.shape[index]
    return math.prod(shard) * 4
