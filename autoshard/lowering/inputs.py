"""The arguments of a call, checked against those that a plan was made for."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..capture import CallSignature, differences
from ..errors import InputError
from ..layout import format_layout, local_shape
from ..plans import ShardingPlan, TensorEntry
from .adapter import device_of
from .cuts import cut_as, noted_cut
from .placements import placements_of

_PLAIN = (torch.Tensor, nn.Parameter)
_MARKS = {"_is_param": nn.Parameter, "_is_buffer": nn.Buffer}
"""Attributes by which torch knows tensors of its classes, of which they need be no objects."""


class Inputs:
    """Takes the tensors of the plan's inputs out of the arguments of a call.

    Args:
        args, kwargs: those that the model was captured with.
        strided: whether the forward asks how tensors lie in memory.
        classed: whether the forward asks an argument whether it is a parameter or a buffer; what it was captured with
            is neither.
        absent: attributes that the forward asks its arguments for, and that none of them had.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        mesh: DeviceMesh,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        strided: bool,
        classed: bool,
        absent: frozenset[str],
    ) -> None:
        self._signature = CallSignature(model)
        planned = self._signature.bind(args, kwargs)
        self._planned = replace(planned, leaves=tuple(_without_memory(leaf) for leaf in planned.leaves))
        self._plan, self._classed, self._absent = plan, classed, absent
        self._mesh = mesh
        self._device = device_of(mesh)
        self._coordinate = tuple(mesh.get_coordinate() or ())
        self._entries = {entry.name: entry for entry in plan.inputs}
        self._cuts = {entry.name: cut_as(entry.shape, entry.layout, plan.mesh) for entry in plan.inputs}
        self._strided = strided

    @property
    def names(self) -> Collection[str]:
        """The names of the plan's inputs."""
        return self._entries.keys()

    @property
    def unwanted(self) -> frozenset[str]:
        """The attributes that tell an argument from those that the plan was made for, as the forward asks."""
        return self._absent.union(_MARKS if self._classed else ())

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors of a call by name: DTensors, or this rank's shards.

        Raises:
            InputError: the call is not one that the plan was made for; the message names the argument.
        """
        try:
            call = self._signature.bind(args, kwargs)
        except TypeError as error:
            raise InputError(f"forward takes other arguments: {error}; {self._wanted()}") from None
        for difference in differences(self._planned, call):
            raise InputError(f"{difference}; {self._wanted()}, make another plan for another call")
        tensors = call.tensors()
        for name, tensor in tensors.items():
            self._check(self._entries[name], tensor)
        for name, tensor in tensors.items() if self.unwanted else ():
            self._refuse_what_is_asked_for(name, tensor)
        for name, tensor in tensors.items() if self._strided else ():
            if not tensor.is_contiguous():
                raise InputError(
                    f"{name} is not contiguous (strides {tensor.stride()}), as arguments are in a plan, and the "
                    "forward asks how a tensor lies in memory; call it with x.contiguous()"
                )
        return tensors

    def _refuse_what_is_asked_for(self, name: str, tensor: torch.Tensor) -> None:
        for kind in _MARKS.values() if self._classed else ():
            if isinstance(tensor, kind):
                raise InputError(
                    f"{name} is a {kind.__name__}, and the forward asks of which class it is: the plan is that of a "
                    "plain tensor. Give it a .detach(), or what the class says as an argument of its own"
                )
        for attribute in sorted(self._absent & vars(tensor).keys()):
            raise InputError(
                f"{name} has an attribute {attribute!r}, for which the forward asks and which no argument had when "
                "the model was captured; give what it says as an argument of its own"
            )

    def refuse_aliases(self, given: dict[str, torch.Tensor], written: dict[str, torch.Tensor]) -> None:
        """Refuses an argument that shares memory with a buffer that the step writes in place: one process would read
        its new values halfway through the forward.

        Raises:
            InputError: one does.
        """
        storages = {_storage(tensor): name for name, tensor in written.items()}
        for name, tensor in given.items():
            if buffer := storages.get(_storage(tensor)):
                raise InputError(f"{name} shares memory with the buffer {buffer}, which the step changes; give a clone")

    def _wanted(self) -> str:
        return f"the plan was made for the tensors {', '.join(self._entries) or '(none)'}"

    def _check(self, entry: TensorEntry, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            raise InputError(f"{entry.name} requires a gradient, but the plan has none for inputs; detach it")
        if isinstance(tensor, DTensor):
            self._check_placed(entry, tensor)
            tensor = tensor.to_local()
        if type(tensor) not in _PLAIN or tensor.layout != torch.strided:
            raise InputError(
                f"{entry.name} is a {type(tensor).__name__} of layout {tensor.layout}; pass a plain dense tensor or a "
                "DTensor"
            )
        wanted = local_shape(entry.shape, entry.layout, self._plan.mesh, self._coordinate)
        if tuple(tensor.shape) != wanted:
            raise InputError(self._wrong_shape(entry, tensor, wanted))
        if (cut := noted_cut(tensor)) is not None and cut != self._cuts[entry.name]:
            raise InputError(
                f"{entry.name} was cut by shard_inputs as {cut}, and the plan takes {self._cuts[entry.name]}: cut it "
                "by this plan"
            )
        if str(tensor.dtype) != f"torch.{entry.dtype}":
            raise InputError(f"{entry.name} has dtype {tensor.dtype}; the plan was made for {entry.dtype}")
        if tensor.device != self._device:
            raise InputError(f"{entry.name} is on {tensor.device}, and this rank runs on {self._device}; move it there")

    def _check_placed(self, entry: TensorEntry, tensor: DTensor) -> None:
        placements = placements_of(entry.layout)
        if tensor.shape != entry.shape or tuple(tensor.placements) != placements:
            raise InputError(
                f"{entry.name} is a DTensor of shape {list(tensor.shape)} placed {tuple(tensor.placements)}; the "
                f"plan wants {list(entry.shape)} placed {placements}: redistribute it first"
            )
        if tensor.device_mesh != self._mesh:
            raise InputError(f"{entry.name} is a DTensor on {tensor.device_mesh}; the module runs on {self._mesh}")

    def _wrong_shape(self, entry: TensorEntry, tensor: torch.Tensor, wanted: Iterable[int]) -> str:
        layout = format_layout(entry.layout, self._plan.mesh)
        if tuple(tensor.shape) == entry.shape:
            return (
                f"{entry.name} has the full shape {list(entry.shape)}, but each rank passes its shard {list(wanted)} "
                f"({layout}); cut it with autoshard.shard_inputs(plan, mesh, ...)"
            )
        command = (
            f"autoshard plan FILE.py:FACTORY --mesh {self._plan.mesh} --hardware {self._plan.hardware} --held-as "
            "PLAN.yaml -o OTHER.yaml"
        )
        return (
            f"{entry.name} has shape {list(tensor.shape)}; the plan was made for {list(entry.shape)} in all, which is "
            f"{list(wanted)} on this rank ({layout}): each rank gives what autoshard.shard_inputs(plan, mesh, ...) "
            "makes of a full batch, or of the part that autoshard.sampler has it read. For batches of both shapes, "
            f"plan the other one too ({command}) and give parallelize both plans; or batches=[...], for other sizes of "
            "the batch in its layouts"
        )


def _without_memory(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty(leaf.size(), dtype=leaf.dtype, device="meta")


def _storage(tensor: torch.Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
