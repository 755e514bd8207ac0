"""The parameters and buffers of a parallel module, checked whenever they are read.

After the module was made, its user can convert it (``module.to(torch.bfloat16)``), replace tensors, or begin to train
what was frozen. The local program knows nothing of that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ..errors import PlanMismatchError
from ..plans import ShardingPlan, TensorEntry
from .adapter import Remembered
from .placements import placements_of

_UNFREEZE = (
    "set requires_grad before the model is planned (what trains later is planned as trained, and may be frozen for a "
    "while after it)"
)


@dataclass(frozen=True, eq=False)
class _Place:
    """Where the model keeps a tensor, and what the plan says of it; ``placements`` is None for a buffer."""

    table: dict[str, Any]
    key: str
    entry: TensorEntry
    dtype: torch.dtype
    placements: tuple[Placement, ...] | None
    is_trained: bool


class HeldTensors:
    """The tensors of a model by FQN, as they are now."""

    def __init__(self, model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        entries = {entry.name: entry for entry in (*plan.parameters, *plan.buffers)}
        self._places = {
            name: _place(table, key, entries[name]) for name, table, key in _tables(model) if name in entries
        }
        self._checked: dict[str, Remembered] = {}
        for name, place in self._places.items():
            self._remember(name, place, place.table[place.key])

    def __getitem__(self, name: str) -> torch.Tensor:
        """A parameter or buffer.

        Raises:
            PlanMismatchError: it is no longer what the plan was made for.
        """
        place = self._places[name]
        tensor: Any = place.table.get(place.key)
        if not self._is_as_checked(name, place, tensor):
            self._check(place, tensor)
            self._remember(name, place, tensor)
        return tensor  # type: ignore[no-any-return]

    def _is_as_checked(self, name: str, place: _Place, tensor: Any) -> bool:
        """Whether a parameter is a DTensor that says of itself what it said when it was checked, which most calls of a
        module find. What ``requires_grad`` changes, it does not say.
        """
        checked = self._checked.get(name)
        return (
            checked is not None
            and isinstance(tensor, DTensor)
            and checked.is_as_it_was(tensor)
            and tensor.dtype == place.dtype
            and tensor.shape == place.entry.shape
            and not tensor.is_meta
            and (place.is_trained or not tensor.requires_grad)
        )

    def _remember(self, name: str, place: _Place, tensor: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            if name in self._checked and self._checked[name].has_other_data(tensor):
                raise _mismatch(
                    place,
                    "has .data that were assigned, of which its shard knows nothing,",
                    "write into it (with torch.no_grad(): parameter.copy_(other))",
                )
            self._checked[name] = Remembered(tensor)

    def _check(self, place: _Place, tensor: Any) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise _mismatch(place, "is gone", "put it back")
        if tensor.is_meta:
            raise _mismatch(place, "is on the meta device", "fill it (to_empty, then a checkpoint or initialisation)")
        if tensor.dtype != place.dtype:
            raise _mismatch(
                place, f"is {_text(tensor.dtype)}", "convert the model before it is planned and parallelized"
            )
        if tuple(tensor.shape) != place.entry.shape:
            raise _mismatch(place, f"has shape {list(tensor.shape)}", "plan the model again")
        if tensor.device.type != self._mesh.device_type:
            raise _mismatch(place, f"is on {tensor.device}", f"move it back to {self._mesh.device_type}")
        if tensor.requires_grad and not place.is_trained and torch.is_grad_enabled():
            raise _mismatch(place, "requires a gradient", _UNFREEZE)
        if place.placements is not None:
            self._check_placed(place, tensor)

    def replace(self, name: str, tensor: torch.Tensor) -> None:
        """Puts another tensor in the place of a buffer that the forward assigned."""
        place = self._places[name]
        place.table[place.key] = tensor

    def _check_placed(self, place: _Place, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, DTensor):
            raise _mismatch(
                place,
                "is a plain tensor",
                "use the module's load_state_dict, or make them DTensors (torch.distributed.tensor.distribute_tensor)",
            )
        if tensor.device_mesh != self._mesh or tuple(tensor.placements) != place.placements:
            raise _mismatch(place, f"is placed {tuple(tensor.placements)} on {tensor.device_mesh}", "redistribute it")


def _place(table: dict[str, Any], key: str, entry: TensorEntry) -> _Place:
    tensor = table[key]
    placements = placements_of(entry.layout) if isinstance(tensor, nn.Parameter) else None
    return _Place(table, key, entry, getattr(torch, entry.dtype), placements, tensor.requires_grad)


def _mismatch(place: _Place, found: str, remedy: str) -> PlanMismatchError:
    entry = place.entry
    kind = "buffer" if place.placements is None else "parameter"
    wanted = f"{entry.dtype}{list(entry.shape)}"
    if place.placements is not None:
        wanted += f" as a DTensor placed {place.placements}" + ("" if place.is_trained else ", frozen")
    return PlanMismatchError(f"the {kind} {entry.name} {found} now; the plan was made for {wanted}: {remedy}")


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tables(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where each parameter and buffer is kept: FQN, then the table of its module and its key there."""
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    yield (f"{path}.{key}" if path else key), table, key
