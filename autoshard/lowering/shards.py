"""From whole parameters to this rank's shards, once, and the copies of a shard made alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..capture import exchange
from ..errors import InputError
from ..layout import Layout, local_ranges, local_shape
from ..mesh import Mesh
from ..plans import ShardingPlan
from .adapter import broadcast, broadcast_along, device_of, rank_in_job
from .placements import as_dtensor, cuts_of
from .taken import mark_taken


def local_part(tensor: torch.Tensor, layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The block of a whole tensor that the rank at a coordinate holds, as a contiguous tensor of its own."""
    return block_of(tensor, layout, mesh, coordinate).clone(memory_format=torch.contiguous_format)


def block_of(tensor: torch.Tensor, layout: Layout, mesh: Mesh, coordinate: tuple[int, ...]) -> torch.Tensor:
    """The same as a view of the whole, but for a dim that is cut in parts, whose blocks are joined."""
    for dim, size in enumerate(tensor.shape):
        blocks = [
            tensor.narrow(dim, start, stop - start) for start, stop in local_ranges(size, layout, dim, mesh, coordinate)
        ]
        tensor = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim)
    return tensor


def shard_parameters(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> None:
    """Replaces every parameter of a model by a DTensor placed as planned, with the values of the mesh's first rank.

    Parameters on the meta device stay there. Buffers move to the mesh's device. Both keep the attributes that the user
    gave them. In containers that modules have
    as attributes both stand in the place of what they were. Tied parameters and buffers stay tied.

    Raises:
        InputError: a parameter has a gradient already, which would be lost.
    """
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise InputError(f"the parameter {name} has a gradient, which would be lost; call model.zero_grad() first")
    layouts = {entry.name: entry.layout for entry in plan.parameters}
    device = device_of(mesh)
    made: dict[int, nn.Parameter] = {}
    copies: dict[int, torch.Tensor] = {}
    parameters, buffers = list(model.parameters()), list(model.buffers())
    for path, module in model.named_modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:
                name = f"{path}.{key}" if path else key
                made[id(parameter)] = _sharded(parameter, layouts[name], plan.mesh, mesh, device)
                mark_taken(parameter, name)
            module._parameters[key] = made[id(parameter)]
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.device.type != "meta":
                if id(buffer) not in copies:
                    copies[id(buffer)] = broadcast(_copy(buffer, device), mesh)
                    vars(copies[id(buffer)]).update(vars(buffer))
                module._buffers[key] = copies[id(buffer)]
    exchanged: list[tuple[torch.Tensor, torch.Tensor]] = [(each, made[id(each)]) for each in parameters]
    exchange(model, [*exchanged, *((each, copies[id(each)]) for each in buffers if id(each) in copies)])


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.detach().to(device, copy=True).contiguous()


def cut_state(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state of a module, with DTensors placed as its own in the place of whole plain tensors and of DTensors on
    other meshes (FSDP2's, another plan's), which all ranks gather.

    Raises:
        InputError: it holds shards of another rank.
    """
    made = OrderedDict(state)
    made.update(_cut(module.named_parameters(remove_duplicate=False), state))
    if hasattr(state, "_metadata"):
        made._metadata = state._metadata  # type: ignore[attr-defined]  # versions of modules, which torch keeps there
    return made


def cut_what_parts_load(module: nn.Module) -> None:
    """Has parts of a module, and modules around it, take the states that it takes: by a hook of each module."""
    for part in module.modules():
        if part._parameters:
            part.register_load_state_dict_pre_hook(_cut_given)


def _cut_given(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    own = ((prefix + name, parameter) for name, parameter in module._parameters.items())
    state.update(_cut(own, state))


def _cut(parameters: Iterable[tuple[str, Any]], state: Mapping[str, Any]) -> dict[str, DTensor]:
    """What a state has for parameters that are DTensors, where it is placed otherwise, placed as these."""
    made: dict[str, DTensor] = {}
    tied: dict[tuple[int, int], DTensor] = {}
    for name, ours in parameters:
        given = state.get(name)
        if not isinstance(ours, DTensor) or not isinstance(given, torch.Tensor):
            continue
        if isinstance(given, DTensor):
            _check_own(name, given, ours.device_mesh)
            if given.device_mesh == ours.device_mesh:
                continue
        if given.shape == ours.shape:  # torch names what has another one
            key = id(ours), id(given) if isinstance(given, DTensor) else given.data_ptr()
            if key not in tied:
                tied[key] = _placed_as(ours, given.detach())
            made[name] = tied[key]
    return made


def _placed_as(ours: DTensor, given: torch.Tensor) -> DTensor:
    whole = given.full_tensor() if isinstance(given, DTensor) else given
    mesh, layout = ours.device_mesh, cuts_of(ours.placements)
    axes = Mesh(tuple(f"axis{i}" for i in range(mesh.ndim)), tuple(mesh.shape))
    local = local_part(whole, layout, axes, tuple(mesh.get_coordinate() or ())).to(device_of(mesh))
    return as_dtensor(local, tuple(ours.shape), layout, mesh)


def _check_own(name: str, tensor: DTensor, mesh: DeviceMesh) -> None:
    """Raises the error for a DTensor that was loaded from a file and holds what another rank has of it: its mesh knows
    whose it was. On an equal mesh copies may come from any rank that has the same shard.
    """
    theirs, ours = (tuple(each.get_coordinate() or ()) for each in (tensor.device_mesh, mesh))
    if tensor.device_mesh == mesh:
        ranks = zip(tensor.placements, theirs, ours)
        other = any(not placement.is_replicate() and one != our for placement, one, our in ranks)
    else:
        cut = not all(placement.is_replicate() for placement in tensor.placements)
        other = cut and bool(theirs) and int(tensor.device_mesh.mesh[theirs]) != rank_in_job()
    if other:
        raise InputError(
            f"{name} in the state is a shard of the rank at {list(theirs)} of the mesh, and this one is at "
            f"{list(ours)}: torch.save of a state_dict writes the shards of the rank that calls it. Save and "
            "load with torch.distributed.checkpoint (docs/training.md, 'Checkpoints'), or save whole tensors: "
            "{name: tensor.full_tensor() ...}, called on all ranks"
        )


def agree_on_replicas(module: nn.Module, mesh: DeviceMesh) -> None:
    """Gives every copy of a shard, and of a buffer, the values of the first copy."""
    for parameter in module.parameters():
        assert isinstance(parameter, DTensor)
        for axis, placement in enumerate(parameter.placements):
            if placement.is_replicate():
                broadcast_along(parameter.to_local().detach(), mesh, axis)
    for buffer in module.buffers():
        if not buffer.is_meta:  # one that no plan reads
            broadcast(buffer, mesh)


def _sharded(
    parameter: nn.Parameter, layout: Layout, mesh: Mesh, device_mesh: DeviceMesh, device: torch.device
) -> nn.Parameter:
    """A parameter as a DTensor, with the attributes that the user gave it."""
    coordinate = tuple(device_mesh.get_coordinate() or ())
    with torch.no_grad():
        if parameter.device.type == "meta":
            shape = local_shape(tuple(parameter.shape), layout, mesh, coordinate)
            local = torch.empty(shape, dtype=parameter.dtype, device="meta")
        else:
            whole = broadcast(_copy(parameter, device), device_mesh)
            local = local_part(whole, layout, mesh, coordinate)
        sharded = as_dtensor(local, tuple(parameter.shape), layout, device_mesh)
    made = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    return made
