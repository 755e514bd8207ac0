"""Giving a parallel module its first values: those of one process, one parameter at a time.

The initialisation of a model draws numbers and writes into parts of tensors. On DTensors both go wrong in torch: on a
CPU every shard draws the same numbers, on CUDA others than one process, and what is written into a part (the row of a
padding index) is lost where that part has to be gathered first. So :func:`autoshard.as_one_process` lets operators on a
parameter work on the whole of it, as one process would, and keeps this rank's block as soon as another parameter's turn
comes.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..errors import InputError
from ..layout import Layout
from ..ops import overwrites
from ..plans import ShardingPlan
from .adapter import broadcast, default_generator, device_of, local_of, memory_of
from .agree import is_same_everywhere
from .shards import block_of

_SAMPLED = 1024  # elements of a parameter that ranks compare
_FILLED: ContextVar[tuple[int, ...]] = ContextVar("the modules that are being filled, by id", default=())


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Inside, modules are built with parameters on the meta device, and with buffers that have their values.

    ``with torch.device("meta")`` leaves buffers without values too. Those that no checkpoint holds and that only the
    constructor of the model computes (tables of rotary embeddings) are then lost.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta and not is_lazy(parameter):
            made = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            module._parameters[name] = made

    setattr(nn.Module, "register_parameter", on_meta)  # noqa: B010  # torch has no other way in
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def emptied(tensor: torch.Tensor, device: torch.device | str | int | None) -> torch.Tensor:
    """A tensor in the place of one on the meta device, with values that say that it was never filled; one that has
    values already keeps them.
    """
    if not tensor.is_meta:
        return tensor.to(device)
    made = torch.empty_like(tensor, device=device)
    if (value := _unset(tensor.dtype)) is not None:
        local_of(made).detach().fill_(value)
    return made


def check_filled(tensors: Mapping[str, torch.Tensor]) -> None:
    """Checks that what ``to_empty`` made has been given values.

    Raises:
        InputError: something has not; names it.
    """
    found = [name for name, tensor in tensors.items() if _is_unset(local_of(tensor).detach())]
    if found:
        several = f", and so are {len(found) - 1} more ({', '.join(found[1:4])}, ...)" if len(found) > 1 else ""
        raise InputError(
            f"{found[0]} is empty: to_empty made it, and since then nothing has filled it, or not all of it{several}. "
            "Load a checkpoint (autoshard.load_weights) or let the model's initialisation fill it; a buffer that only "
            "the constructor of the model computes has its values if the model is built in autoshard.weights_on_meta()"
        )


def _unset(dtype: torch.dtype) -> float | int | None:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min if dtype != torch.bool and torch.iinfo(dtype).bits >= 32 else None


def _is_unset(tensor: torch.Tensor) -> bool:
    value = _unset(tensor.dtype)
    if value is None or not tensor.numel():
        return False
    return bool(tensor.isnan().any() if value != value else (tensor == value).all())


@contextmanager
def as_one_process_on(module: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> Iterator[None]:
    """What :func:`autoshard.as_one_process` does, for a module that holds its parameters as a plan says."""
    if id(module) in _FILLED.get():
        yield
        return
    token = _FILLED.set((*_FILLED.get(), id(module)))
    mode = _Wholes(module, plan, mesh)
    try:
        with mode:
            yield
        mode.cut(keep=())
        mode.check_same()
    finally:
        mode.give_generators_back()
        _FILLED.reset(token)


class _Wholes(TorchDispatchMode):
    """Runs operators on the parameters of a module on their whole values.

    A parameter is made whole when an operator takes it, and cut again when one takes another. A view of it that the
    caller keeps is a view of the whole; as long as there is one, the whole is not made again, and is cut once more
    after it was used. Parameters are told by the memory of their shards, wholes by their own.
    """

    def __init__(self, module: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> None:
        super().__init__()
        layouts = {entry.name: entry.layout for entry in plan.parameters}
        self._mesh, self._plan, self._device = mesh, plan, device_of(mesh)
        self._held: dict[int, tuple[str, DTensor, Layout]] = {
            memory_of(local_of(parameter)): (name, parameter, layouts[name])
            for name, parameter in module.named_parameters()
            if isinstance(parameter, DTensor) and name in layouts
        }
        self._wholes: dict[int, torch.Tensor] = {}
        self._viewed: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by memory of the whole: its parameter and storage
        self._before: list[tuple[torch.Generator, torch.Tensor]] | None = None
        self._digest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        taken = {at: key for at, leaf in enumerate(leaves) if (key := self._parameter_of(leaf)) is not None}
        if not taken:
            return func(*args, **(kwargs or {}))
        self._draw_as_first_rank()
        self.cut(keep=taken.values())
        originals: dict[int, Any] = {}
        for at, key in taken.items():
            if isinstance(leaves[at], DTensor):
                whole = self._whole(key, is_written=at == 0 and overwrites(func))
                originals[id(whole)] = leaves[at]
                leaves[at] = whole
        args, kwargs = tree_unflatten(leaves, spec)
        # what an operator gives back that it has written into is the parameter, as the caller knows it
        return tree_map_only(torch.Tensor, lambda made: originals.get(id(made), made), func(*args, **kwargs))

    def cut(self, keep: Iterable[int]) -> None:
        """Keeps this rank's block of every whole but of some parameters'."""
        coordinate = tuple(self._mesh.get_coordinate() or ())
        for key in [key for key in self._wholes if key not in set(keep)]:
            _, parameter, layout = self._held[key]
            whole = self._wholes.pop(key)
            local_of(parameter).detach().copy_(block_of(whole, layout, self._plan.mesh, coordinate))
            some = whole.flatten()[:_SAMPLED].contiguous().view(torch.uint8)
            self._digest = zlib.crc32(some.cpu().numpy().tobytes(), self._digest)
            self._viewed[memory_of(whole)] = key, weakref.ref(whole.untyped_storage())
        self._viewed = {memory: (key, storage) for memory, (key, storage) in self._viewed.items() if storage()}

    def check_same(self) -> None:
        """Checks that all ranks gave the parameters the same values.

        Raises:
            InputError: they did not.
        """
        if self._before is not None and not is_same_everywhere([self._digest], self._mesh):
            raise InputError(
                "the ranks gave the parameters different values; seed generators of your own alike on all ranks, and "
                "read the same files (the default generators are those of the mesh's first rank here)"
            )

    def give_generators_back(self) -> None:
        """Ranks but the first have the generators that they had."""
        if any(self._mesh.get_coordinate() or ()):
            for generator, state in self._before or ():
                generator.set_state(state)

    def _draw_as_first_rank(self) -> None:
        """With the first parameter, all ranks draw from generators in the state of those of the first rank."""
        if self._before is None:
            generators = {id(g): g for g in (torch.default_generator, default_generator(self._device))}.values()
            self._before = [(generator, generator.get_state()) for generator in generators]
            for generator, state in self._before:
                generator.set_state(broadcast(state.to(self._device, copy=True), self._mesh).cpu())

    def _parameter_of(self, leaf: Any) -> int | None:
        """The parameter that an argument is, or a view of the whole of; none is for any other argument.

        Raises:
            InputError: it is a parameter on the meta device.
        """
        if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
            return None
        memory = memory_of(local_of(leaf))
        if isinstance(leaf, DTensor):
            name, parameter, _ = self._held.get(memory, ("", None, None))
            if parameter is None or leaf.shape != parameter.shape:
                return None
            if leaf.is_meta:
                raise InputError(f"{name} is on the meta device, and cannot be filled; call to_empty(device=...) first")
            return memory
        for key, whole in self._wholes.items():
            if memory_of(whole) == memory:
                return key
        return self._again(memory)

    def _again(self, memory: int) -> int | None:
        """The parameter of a whole that was cut, and of which there is a view; it is not done yet."""
        key, reference = self._viewed.get(memory, (0, None))
        storage = reference() if reference is not None else None
        if storage is None:
            return None
        parameter = self._held[key][1]
        self._wholes[key] = (
            torch.empty(0, dtype=parameter.dtype, device=self._device).set_(storage).view(parameter.shape)
        )
        return key

    def _whole(self, key: int, is_written: bool) -> torch.Tensor:
        for memory, (other, _) in self._viewed.items():
            if other == key and key not in self._wholes:
                self._again(memory)
        if key not in self._wholes:
            _, parameter, _ = self._held[key]
            if is_written:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._device)
            else:
                whole = parameter.full_tensor().detach().clone(memory_format=torch.contiguous_format)
            self._wholes[key] = whole
        return self._wholes[key]
