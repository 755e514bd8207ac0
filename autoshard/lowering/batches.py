"""From a batch to this rank's shards: who reads which samples, and how inputs and targets are cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any, cast, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import Dataset, DistributedSampler

from ..capture import keyword_names
from ..errors import InputError
from ..layout import Layout, R, local_ranges
from ..plans import ShardingPlan, TensorEntry
from .adapter import device_of
from .cuts import cut_as, note_cut, note_read
from .match import check_mesh
from .other_batch import with_batch
from .placements import as_dtensor, cuts_of


@overload
def shard_inputs(
    plan: ShardingPlan, mesh: DeviceMesh, arguments: Mapping[str, Any], /, *, batch: int | None = None
) -> dict[str, Any]: ...
@overload
def shard_inputs(
    plan: ShardingPlan, mesh: DeviceMesh, *tensors: torch.Tensor, batch: int | None = None
) -> tuple[torch.Tensor, ...]: ...
def shard_inputs(
    plan: ShardingPlan, mesh: DeviceMesh, *tensors: torch.Tensor | Mapping[str, Any], batch: int | None = None
) -> tuple[torch.Tensor, ...] | dict[str, Any]:
    """Cuts a full batch, or what this rank has read of one, into this rank's shards, on this rank's device.

        loss = model(*autoshard.shard_inputs(plan, mesh, tokens, targets))
        loss = model(**autoshard.shard_inputs(plan, mesh, {"input_ids": tokens, "labels": targets}))

    Args:
        tensors: one for each of ``plan.inputs``, in that order: the full tensor, equal on all ranks, or the samples
            that a loader with :func:`autoshard.sampler` reads on this rank. Or one mapping with the arguments of the
            call by name, in any order, tensors in containers of their own too: the result is a dict of the same, where
            what is no tensor stays as it is.
        batch: the size of the full batch, where it is not the plan's but one of ``batches`` of
            :func:`autoshard.parallelize`: of a rank's samples ``len(samples) * sampler.num_replicas``.

    Raises:
        InputError: no plan, another number of tensors or other names, or a tensor of another shape than the plan's.
        PlanMismatchError: the plan was made for another mesh.
    """
    _check_is_plan(plan)
    check_mesh(plan, mesh)
    if len(tensors) == 1 and isinstance(tensors[0], Mapping):
        return _sharded_by_name(plan, mesh, tensors[0], batch)
    return _sharded(plan, mesh, cast(Sequence[torch.Tensor], tensors), batch)


def _sharded(
    plan: ShardingPlan, mesh: DeviceMesh, tensors: Sequence[torch.Tensor], batch: int | None
) -> tuple[torch.Tensor, ...]:
    if len(tensors) != len(plan.inputs):
        raise InputError(f"the plan has {_inputs_of(plan)}; {len(tensors)} tensors were given")
    if batch is not None:
        plan = with_batch(plan, batch)
    part, made = _Part(plan, mesh), []
    for entry, tensor in zip(plan.inputs, tensors):
        shard = note_cut(part.cut(entry, tensor), cut_as(entry.shape, entry.layout, plan.mesh))
        made.append(note_read(shard, None if tuple(tensor.shape) == entry.shape else part.index, tensor))
    return tuple(made)


def _sharded_by_name(
    plan: ShardingPlan, mesh: DeviceMesh, arguments: Mapping[str, Any], batch: int | None
) -> dict[str, Any]:
    """The arguments of a call with this rank's shards in the place of tensors."""
    leaves, structure = tree_flatten(dict(arguments))
    wanted = {entry.name for entry in plan.inputs}
    places = {
        name if name in wanted else f"args.{name}": place  # where the model has an attribute of that name
        for place, name in enumerate(keyword_names(arguments))
        if isinstance(leaves[place], torch.Tensor)
    }
    if places.keys() != wanted:
        given = ", ".join(name.removeprefix("args.") for name in places) or "no tensors"
        raise InputError(f"the plan has {_inputs_of(plan)}; what was given has {given}")
    order = [places[entry.name] for entry in plan.inputs]
    for place, shard in zip(order, _sharded(plan, mesh, [leaves[place] for place in order], batch)):
        leaves[place] = shard
    sharded: dict[str, Any] = tree_unflatten(leaves, structure)
    return sharded


def _inputs_of(plan: ShardingPlan) -> str:
    return f"{len(plan.inputs)} inputs ({', '.join(entry.name for entry in plan.inputs)})"


def _check_is_plan(plan: object) -> None:
    if not isinstance(plan, ShardingPlan):
        how = "give model.plan" if isinstance(plan, nn.Module) else "a file is read by autoshard.read_plan"
        raise InputError(f"the first argument is a {type(plan).__name__} in the place of a plan: {how}")


def sampler(plan: ShardingPlan, mesh: DeviceMesh, dataset: Dataset[Any], **options: Any) -> DistributedSampler[Any]:
    """Which samples this rank reads: ranks that hold the same part of a batch read the same ones, others others.

    A loader with it reads ``batch // sampler.num_replicas`` samples at once; :func:`shard_inputs` takes what it reads.
    Together the ranks read the samples of a batch that one process would read, in another order. Where the plan cuts no
    batch, or cuts it unevenly or not for all inputs and results that have one, ranks read all of it.

    Args:
        plan: its inputs say how a batch is cut. The batch is that of the first input that has dims: its ``batch_dim``.
        options: those of ``torch.utils.data.DistributedSampler``: ``shuffle``, ``seed``, ``drop_last``.

    Raises:
        InputError: no plan, or the data set has no length.
        PlanMismatchError: the plan was made for another mesh.
    """
    _check_is_plan(plan)
    check_mesh(plan, mesh)
    if not isinstance(dataset, Sized):
        raise InputError(
            f"{type(dataset).__name__} has no length, and cannot be sampled; let it yield every sample whose number "
            "modulo sampler.num_replicas is sampler.rank, those of a sampler for any data set that has one"
        )
    part = _Part(plan, mesh)
    return DistributedSampler(dataset, part.count, part.index, **options)


def shard_targets(
    plan: ShardingPlan, mesh: DeviceMesh, result: torch.Tensor, *targets: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Cuts plain tensors as a result of the module is cut, for a loss that is computed outside of the model.

    Take losses with ``reduction="sum"`` and divide: of several, torch 2.13 computes means on DTensors rank by rank, so
    that ``mse_loss`` gives gradients as many times too large as there are ranks (docs/training.md, "Data").

    Args:
        result: a DTensor that the module returned.
        targets: plain tensors whose dims are the first dims of the result: full ones, equal on all ranks, or of the
            samples that a loader with :func:`autoshard.sampler` reads on this rank.

    Returns:
        DTensors that torch's losses take beside the result. Where the result is plain, so that nothing is cut, the
        targets on this rank's device.

    Raises:
        InputError: a target has other dims than the result, or is this rank's part of a batch of which the result has
            more.
    """
    _check_is_plan(plan)
    check_mesh(plan, mesh)
    if not isinstance(result, DTensor):
        return tuple(target.to(device_of(mesh)) for target in targets)
    made, part, cuts = [], _Part(_at_batch_of(plan, tuple(result.shape)), mesh), cuts_of(result.placements)
    for number, target in enumerate(targets):
        layout = Layout(tuple(placement if placement.dim < target.ndim else R for placement in cuts))
        shape = tuple(result.shape[: target.ndim])
        entry = TensorEntry(f"target {number + 1}", shape, str(target.dtype).removeprefix("torch."), layout)
        made.append(as_dtensor(part.cut(entry, target), shape, layout, mesh))
    return tuple(made)


def _at_batch_of(plan: ShardingPlan, shape: tuple[int, ...]) -> ShardingPlan:
    """The plan with the batch of a result of this shape, which may be another one of those that are served."""
    for entry in plan.outputs:
        dim = plan.batch_dim_of(entry.shape)
        if dim is not None and len(entry.shape) == len(shape):
            if (*entry.shape[:dim], shape[dim], *entry.shape[dim + 1 :]) == shape:
                return with_batch(plan, shape[dim])
    return plan


class _Part:
    """The part of a batch that this rank reads.

    Where all inputs and results that have the batch cut it over ``dp``, each rank along it reads a part of its own.
    Axes count in mesh order, as the later ones cut the blocks of the earlier ones, up to the first that cuts some of
    these only, or unevenly.

    Attributes:
        count, index: how many parts there are, and which one is this rank's.
    """

    def __init__(self, plan: ShardingPlan, mesh: DeviceMesh) -> None:
        self._mesh, self._device = plan.mesh, device_of(mesh)
        self._coordinate = tuple(mesh.get_coordinate() or ())
        self._size, self._dim_of = plan.batch or 1, plan.batch_dim_of
        entries = [(entry.layout, self._dim_of(entry.shape)) for entry in (*plan.inputs, *plan.outputs)]
        layouts = [(layout, dim) for layout, dim in entries if dim is not None]
        self.count, self.index = 1, 0
        for axis, ranks in enumerate(plan.mesh.shape):
            cutting = {axis in layout.axes_of(dim) for layout, dim in layouts}
            if len(cutting) > 1 or (True in cutting and self._size % (self.count * ranks)):
                break
            if True in cutting:
                self.count, self.index = self.count * ranks, self.index * ranks + self._coordinate[axis]

    def cut(self, entry: TensorEntry, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a full tensor, or of this rank's part of it, in memory of its own. It has the attributes
        that the user gave the tensor, and is a parameter where that is one: a forward may ask for them.
        """
        if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
            raise InputError(f"{entry.name} is a {type(tensor).__name__}; only plain tensors are cut")
        batch, begins = self._dim_of(entry.shape), self._begins(entry, tensor)
        kind = type(tensor)
        noted = {name: value for name, value in vars(tensor).items() if not name.startswith("_autoshard")}
        for dim, size in enumerate(entry.shape):
            ranges = local_ranges(size, entry.layout, dim, self._mesh, self._coordinate)
            begin = begins if dim == batch else 0
            if ranges[0][0] < begin or ranges[-1][1] - begin > tensor.shape[dim]:
                raise InputError(
                    f"{entry.name} is the part of a batch that this rank read, {list(tensor.shape)} of "
                    f"{list(entry.shape)}, and the rank needs more of it; give the full one"
                )
            blocks = [tensor.narrow(dim, start - begin, stop - start) for start, stop in ranges]
            tensor = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)
        made = tensor.to(self._device, copy=True, memory_format=torch.contiguous_format)
        if kind is nn.Parameter:
            made = nn.Parameter(made, made.requires_grad)
        vars(made).update(noted)
        return made

    def _begins(self, entry: TensorEntry, tensor: torch.Tensor) -> int:
        """Where in the batch of the full tensor a given one begins."""
        given, full, batch = tuple(tensor.shape), entry.shape, self._dim_of(entry.shape)
        if given == full:
            return 0
        part = tuple(self._size // self.count if dim == batch else size for dim, size in enumerate(full))
        if batch is not None and given == part:
            return self.index * given[batch]
        read = f", or {list(part)}, what a rank reads of it" if self.count > 1 and batch is not None else ""
        said = f"{entry.name} has shape {list(given)}; the full batch is {list(full)}{read}"
        if batch is None or len(given) != len(full) or 0 in given:
            raise InputError(said)
        rows = given[batch]
        if (*full[:batch], rows, *full[batch + 1 :]) == given:
            said += (
                f". A batch of {rows} wants parallelize(..., batches=[{rows}]), or auto_parallelize likewise, and "
                f"shard_inputs(..., batch={rows})"
            )
        raise InputError(said)
