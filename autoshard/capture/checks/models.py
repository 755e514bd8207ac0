"""Models that cannot be captured faithfully, whatever their forward does: hooks, shared memory, unusual tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ...errors import CaptureError
from ..adapter import global_hooks, gradient_hooks, is_plain, module_backward_hooks, overlap, storage_of
from ..arguments import Call
from ..contained import Contained, contained_in


def check_model(model: nn.Module) -> None:
    """Checks that the tensors and hooks of a model are of a kind that a captured step can honour.

    Raises:
        CaptureError: they are not; the message names the tensor or module.
    """
    if hooks := global_hooks():
        raise CaptureError(
            f"a hook on all modules is registered ({_named(hooks[0])}); a captured step does not call it; "
            "remove it, or register hooks on modules"
        )
    for path, module in model.named_modules():
        if module_backward_hooks(module):
            raise CaptureError(
                f"the module {path or type(module).__name__} has a backward hook, which a captured step does not call; "
                "remove it, or register a hook on the parallel module or on its parameters"
            )
    for name, tensor in _tensors(model):
        _check_tensor(name, tensor)
    _check_memory(model)


def hold_plain_tensors(model: nn.Module, among: Collection[str] | None = None) -> set[str]:
    """Makes buffers, which checkpoints leave out, of tensors that modules have as plain attributes (a table of
    positions that is computed once): a plan lays out what a model holds, and knows such a tensor by no name. One that
    several modules have is one buffer of several names.

    Those that want a gradient, are of an unusual kind, are buffers already, or share memory with another stay as they
    are.

    Args:
        among: the FQNs of those that may become buffers; None for all.

    Returns:
        The FQNs of those that became buffers now.
    """
    made = set()
    holders: dict[int, list[tuple[nn.Module | None, str, str, torch.Tensor]]] = defaultdict(list)
    for _, tensor in _tensors(model):
        holders[storage_of(tensor)].append((None, "", "", tensor))
    for path, module in model.named_modules():
        for name, tensor in vars(module).items():
            is_meant = among is None or f"{path}.{name}".removeprefix(".") in among
            if isinstance(tensor, torch.Tensor) and is_plain(tensor) and not is_lazy(tensor) and is_meant:
                holders[storage_of(tensor)].append((module, path, name, tensor))
    for found in holders.values():
        *_, tensor = found[0]
        if tensor.requires_grad or any(holder is None or other is not tensor for holder, *_, other in found):
            continue
        for holder, path, name, _ in found:
            assert holder is not None
            delattr(holder, name)
            holder.register_buffer(name, tensor, persistent=False)
            made.add(f"{path}.{name}".removeprefix("."))
    return made


def let_plain(model: nn.Module, names: Iterable[str]) -> None:
    """Makes plain attributes of buffers again, which is what they were before :func:`hold_plain_tensors`."""
    for name in names:
        owner, _, attribute = name.rpartition(".")
        holder = model.get_submodule(owner)
        tensor = holder.get_buffer(attribute)
        delattr(holder, attribute)
        setattr(holder, attribute, tensor)


@contextmanager
def contained_tensors_held(model: nn.Module) -> Iterator[set[str]]:
    """Inside, tensors in lists, tuples and dicts that modules have as attributes are buffers, which checkpoints leave
    out, and stand where they stood, too. Those whose FQNs are added to what this gives stay buffers.

    As of plain attributes, those that want a gradient, are of an unusual kind, or share memory with another are none. A
    buffer of an earlier capture becomes what the container has now.
    """
    places = list(contained_in(model))
    known = {id(tensor) for _, tensor in _tensors(model)}
    sharing: dict[int, set[int]] = defaultdict(set)
    plain = (value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))
    for tensor in (*(tensor for _, tensor in places), *(tensor for _, tensor in _tensors(model)), *plain):
        if is_plain(tensor) and not is_lazy(tensor):
            sharing[storage_of(tensor)].add(id(tensor))
    made: dict[str, Contained] = {}
    for place, tensor in places:
        is_alone = is_plain(tensor) and not is_lazy(tensor) and len(sharing[storage_of(tensor)]) == 1
        if is_alone and not isinstance(tensor, nn.Parameter) and not tensor.requires_grad and id(tensor) not in known:
            known.add(id(tensor))
            if place.name in place.module._buffers:
                place.module._buffers[place.name] = tensor
            else:
                place.module.register_buffer(place.name, tensor, persistent=False)
                made[f"{place.path}.{place.name}".removeprefix(".")] = place
    read: set[str] = set()
    try:
        yield read
    finally:
        for name in made.keys() - read:
            delattr(made[name].module, made[name].name)


def check_example(call: Call) -> None:
    """Checks that the tensors of an example call are plain ones that want no gradient, and have each its own name.

    Raises:
        CaptureError: they are not, or have not.
    """
    for name, count in Counter(call.names).items():
        if count > 1:
            raise CaptureError(f"two arguments are both called {name}; rename a key of the containers that hold them")
    for name, tensor in call.tensors().items():
        if tensor.requires_grad:
            raise CaptureError(
                f"the argument {name} requires a gradient, but a plan has none for arguments; detach it, or make it a "
                "parameter of the model"
            )
        if not (is_plain(tensor) or isinstance(tensor, DTensor)):
            raise CaptureError(
                f"the argument {name} is a {type(tensor).__name__} of layout {tensor.layout}; give a plain dense tensor"
            )


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise CaptureError(f"{name} has no shape yet; call the model once, so that lazy modules make their parameters")
    if not is_plain(tensor):
        raise CaptureError(
            f"{name} is a {type(tensor).__name__} of layout {tensor.layout}; autoshard plans plain dense tensors (a "
            "model that is sharded, sparse or quantized already cannot be planned)"
        )
    if hooks := gradient_hooks(tensor):
        raise CaptureError(
            f"{name} has a gradient hook ({_named(hooks[0])}), which would be lost: parameters become DTensors. "
            "Register it on the parameter of the parallel module"
        )


def _check_memory(model: nn.Module) -> None:
    """Refuses tensors of the model that overlap in memory without being one: a change of one would change the other in
    one process, but not where each is sharded by itself.
    """
    storages: dict[int, list[tuple[str, torch.Tensor]]] = defaultdict(list)
    for name, tensor in _tensors(model):
        storages[storage_of(tensor)].append((name, tensor))
    for tensors in storages.values():
        for (name, tensor), (other_name, other) in combinations(tensors, 2):
            if overlap(tensor, other):
                raise CaptureError(
                    f"{name} and {other_name} are different tensors that share memory; make them one tensor (for "
                    "example b.weight = a.weight), or give each its own (.clone())"
                )


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _named(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__name__))
