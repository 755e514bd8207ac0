"""Weights from files, of which every rank reads its part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError
from ..layout import Layout, R, local_ranges
from ..plans import ShardingPlan
from .adapter import device_of, local_of
from .agree import agreed
from .board import open_board
from .module import mesh_of_module, plan_of
from .weight_files import Blocks, Stored, WeightFiles, weight_files

_STAGE = "loading weights"


def load_weights(module: nn.Module, path: str | os.PathLike[str], *, cast: bool = False) -> None:
    """Fills a parallel module from files; every rank reads the blocks that it holds. All ranks call it.

    Args:
        module: what :func:`autoshard.parallelize` made. What is on the meta device is made real (``to_empty``).
        path: a folder in the layout of Hugging Face (``model.safetensors``, or ``model.safetensors.index.json`` and the
            files that it names), one ``.safetensors`` file, or a folder of ``torch.distributed.checkpoint``, in which
            the model may be one part beside others (``{"model": ..., "optimizer": ...}``). Names are those of
            ``module.state_dict()``; of tied parameters the file holds one or all.
        cast: take tensors of other dtypes, converted, as ``load_state_dict`` does.

    Raises:
        InputError: no plan runs in the module, there are no such files, or they do not fit: tensors are missing, or are
            there and not in the model, or have other shapes or dtypes, or differ where the model ties them; says all of
            them. The module is then as it was.
        JobError: another rank failed; says which, and in what.
    """
    plan, mesh = plan_of(module), mesh_of_module(module)
    with agreed(open_board(mesh), _STAGE):
        files = weight_files(Path(path))
        held = _held(module)
        names = [name for each in held for name in each]
        prefix = _prefix(names, files.stored)
        stored = {name.removeprefix(prefix): entry for name, entry in files.stored.items() if name.startswith(prefix)}
        if problems := _problems(held, stored, cast):
            raise InputError(f"the weights in {path} do not fit the model: {'; '.join(problems)}")
        if any(tensor.is_meta for tensor in held.values()):
            module.to_empty(device=device_of(mesh))
            held = _held(module)
        with torch.no_grad():
            _read(files, prefix, held, stored, plan, mesh)


def _held(module: nn.Module) -> dict[tuple[str, ...], torch.Tensor]:
    """The tensors of a module's state under all names of each; tied ones have several."""
    names: dict[int, tuple[str, ...]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            names[id(value)] = (*names.get(id(value), ()), name)
            tensors[id(value)] = value
    return {names[key]: tensor for key, tensor in tensors.items()}


def _prefix(names: Iterable[str], stored: Mapping[str, Stored]) -> str:
    """What stands in a file before the names of a model that was saved as a part of something (``model.``)."""
    wanted = set(names)
    ends = {saved.removesuffix(name) for name in sorted(wanted)[:1] for saved in stored if saved.endswith(f".{name}")}
    found = {prefix: len(wanted & {name.removeprefix(prefix) for name in stored}) for prefix in ("", *sorted(ends))}
    return max(found, key=lambda prefix: found[prefix])


def _problems(held: Mapping[tuple[str, ...], torch.Tensor], stored: Mapping[str, Stored], cast: bool) -> list[str]:
    """What keeps files from filling a model, a sentence each."""
    found = []
    if missing := [names[0] for names in held if not stored.keys() & set(names)]:
        found.append(f"missing there: {_some(missing)}")
    if unexpected := sorted(stored.keys() - {name for names in held for name in names}):
        found.append(f"not in the model: {_some(unexpected)}")
    for names, tensor in held.items():
        for name in names:
            entry = stored.get(name)
            if entry is not None and entry.shape != tuple(tensor.shape):
                found.append(f"{name} has shape {list(entry.shape)} there, {list(tensor.shape)} in the model")
            elif entry is not None and entry.dtype != tensor.dtype and not cast:
                found.append(f"{name} is {entry.dtype} there, {tensor.dtype} in the model (cast=True converts)")
    return found[:8] + ([f"and {len(found) - 8} more"] if len(found) > 8 else [])


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _read(
    files: WeightFiles,
    prefix: str,
    held: Mapping[tuple[str, ...], torch.Tensor],
    stored: Mapping[str, Stored],
    plan: ShardingPlan,
    mesh: DeviceMesh,
) -> None:
    layouts = {entry.name: entry.layout for entry in plan.parameters}
    whole, coordinate = Layout((R,) * plan.mesh.ndim), tuple(mesh.get_coordinate() or ())
    wanted: dict[str, tuple[Blocks, torch.Tensor]] = {}
    ties: dict[str, tuple[tuple[str, ...], torch.Tensor]] = {}
    for names, tensor in held.items():
        layout = next((layouts[name] for name in names if name in layouts), whole)
        blocks = [local_ranges(n, layout, dim, plan.mesh, coordinate) for dim, n in enumerate(tensor.shape)]
        first, *others = [name for name in names if name in stored]
        wanted[prefix + first] = blocks, tensor
        for name in others:
            wanted[prefix + name] = blocks, torch.empty_like(tensor.detach())
            ties[prefix + name] = names, tensor
    for name, block in files.read(wanted):
        target = local_of(wanted[name][1]).detach()
        target.copy_(block)
        if name in ties:
            names, tensor = ties[name]
            if not torch.equal(target, local_of(tensor)):
                raise InputError(f"{' and '.join(names)} are one tensor in the model, and differ in the files")
