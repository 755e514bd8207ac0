"""A call of a parallel module as ``torch.compile`` traces it: from DTensors to shards, the step's operator, and back.

Dynamo reads :func:`along` line by line; what is decided once for a call of some shapes and modes, it does not see.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from ..capture import SameTensor
from ..errors import AutoshardError
from .compiled import compiler_number, key_of, made_by
from .cuts import note_cut, noted_cut
from .placements import strides_of
from .served_plan import ServedPlan

UNCOMPILED = "a parallel module runs the graphs of its plan as they are here"
"""Why a graph breaks, where it does."""


class _Placed(NamedTuple):
    """A tensor as the caller gets it: a DTensor, or without ``placements`` a plain one; and whether a gradient can
    get to it.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    placements: tuple[Placement, ...]
    has_gradient: bool


@dataclass(frozen=True, eq=False)
class Way:
    """How calls of some shapes and modes go. ``refusal`` says why they cannot be traced; all else is empty then.

    ``arguments`` has a line for each argument of the step: the FQN of a tensor of the model, or the number of a leaf of
    the call. (One text, which costs dynamo one comparison before each call.) ``leaves`` are the kinds of the module's
    results with their numbers: those that are ``made``, an argument given ``back``, an earlier leaf, or one of
    ``constants``. ``written`` are the numbers of arguments that get new values.
    """

    refusal: str
    step: tuple[str, int, int, bool, bool] = ("", 0, 0, False, False)
    arguments: str = ""
    made: tuple[_Placed, ...] = ()
    written: tuple[int, ...] = ()
    back: tuple[tuple[int, _Placed], ...] = ()
    leaves: tuple[tuple[str, int], ...] = ()
    constants: tuple[Any, ...] = ()
    structure: TreeSpec | None = None
    mesh: DeviceMesh | None = None


class _Ways:
    """All ways, each an attribute."""


_WAYS = _Ways()
_MODULES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class _Tensor(NamedTuple):
    """A tensor of a call, as far as a plan asks: ``shape`` is that of the shard."""

    kind: str
    shape: list[int]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    whole: list[int]
    placements: tuple[Placement, ...]
    mesh: DeviceMesh | None
    cut: str | None
    attributes: list[str]


_TENSOR = "autoshard: a tensor"


def let_be_traced(module: nn.Module) -> None:
    """Has traces find a module by its identity: dynamo of torch 2.11 hands no module to what runs as it is."""
    _MODULES[id(module)] = module


def way_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Way:
    """The way of a call that is traced."""
    described = tree_map(partial(_described, _asked(id(module))), (args, kwargs))
    found: Way = getattr(_WAYS, _decided(id(module), module.training, torch.is_grad_enabled(), *described))
    return found


def along(way: Way, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the module gives for a call that is traced."""
    given, _ = tree_flatten((args, kwargs))
    tensors = []
    for name in way.arguments.split("\n") if way.arguments else []:
        if name.isdigit():
            tensors.append(given[int(name)])
        else:
            value: Any = module
            for part in name.split("."):
                value = getattr(value, part)
            tensors.append(value)
    shards = [value.to_local() if isinstance(value, DTensor) else value for value in tensors]
    found = torch.ops.autoshard.forward(*way.step, shards)
    made = [_placed(found[k], place, way.mesh) for k, place in enumerate(way.made)]
    with torch.no_grad():
        for k, number in enumerate(way.written):
            shards[number].copy_(found[len(way.made) + k])
    back = [_placed(tensors[number], place, way.mesh) for number, place in way.back]
    leaves: list[Any] = []
    for kind, number in way.leaves:
        sources = {"made": made, "back": back, "leaf": leaves, "constant": way.constants}
        leaves.append(sources[kind][number])
    assert way.structure is not None
    return tree_unflatten(leaves, way.structure)


def _placed(value: torch.Tensor, place: _Placed, mesh: DeviceMesh | None) -> torch.Tensor:
    if not place.has_gradient and not isinstance(value, nn.Parameter):
        value = value.detach()
    if isinstance(value, DTensor) or not place.placements:
        return value
    shape = torch.Size(place.shape)
    return DTensor.from_local(value, mesh, place.placements, run_check=False, shape=shape, stride=place.stride)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _asked(number: int) -> tuple[str, ...]:
    """The attributes that plans refuse arguments for; runs as it is, while dynamo traces."""
    return tuple(sorted(set().union(*(plan.inputs.unwanted for plan in _MODULES[number]._autoshard.plans))))


def _described(asked: tuple[str, ...], leaf: Any) -> Any:
    """A leaf of a call, a tensor with those of the attributes asked for that it has; sizes that dynamo has made symbols
    of are numbers again, as ``range`` takes no symbols.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    placements: tuple[Placement, ...] = ()
    mesh, local = None, leaf
    if isinstance(leaf, DTensor):
        placements, mesh, local = leaf.placements, leaf.device_mesh, leaf.to_local()
    shape, whole = ([len(range(size)) for size in sizes] for sizes in (local.shape, leaf.shape))
    is_parameter = isinstance(leaf, nn.Parameter)
    noted = [name for name in asked if hasattr(leaf, name) or (is_parameter and name == "_is_param")]
    kind = leaf.dtype, leaf.device, leaf.requires_grad
    return (_TENSOR, shape, *kind, whole, placements, mesh, noted_cut(leaf), noted)


def _is_described(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and bool(leaf) and leaf[0] == _TENSOR


def _stand_in(leaf: Any) -> Any:
    """A tensor as it was described, whose values nobody reads."""
    if not _is_described(leaf):
        return leaf
    like = _Tensor(*leaf)
    local = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if like.mesh is None:
        made = local if like.cut is None else note_cut(local, like.cut)
    else:
        shape = torch.Size(like.whole)
        stride = strides_of(shape)
        made = DTensor.from_local(local, like.mesh, like.placements, run_check=False, shape=shape, stride=stride)
    vars(made).update(dict.fromkeys(like.attributes, True))
    return made.requires_grad_(like.requires_grad)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _decided(number: int, training: bool, grad: bool, args: Any, kwargs: Any) -> str:
    """The name of the way of a call; runs as it is, while dynamo traces."""
    module = _MODULES[number]
    args, kwargs = tree_map(_stand_in, (args, kwargs), is_leaf=_is_described)
    try:
        with module._autoshard.failures.telling("the forward"):
            way = _way(module, grad, args, kwargs)
    except AutoshardError as error:
        way = Way(refusal=str(error))
    name = f"way_{next(_NUMBERS)}"
    setattr(_WAYS, name, way)
    weakref.finalize(module, delattr, _WAYS, name)
    return name


def _way(module: Any, grad: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Way:
    serving = module._autoshard
    plan: ServedPlan
    plan, given = serving.chosen(module, args, kwargs)
    if why := plan.why_uncompiled():
        return Way(refusal=why)
    program, held = plan.program, plan.held()
    places = {id(leaf): k for k, leaf in enumerate(tree_flatten((args, kwargs))[0])}
    arguments = [str(places[id(given[name])]) if name in given else name for name in program.arguments]
    trained = [name for name, value in held.items() if value.requires_grad]
    number = serving.plans.index(plan)
    made = made_by(program)
    returned = (same for k, same in enumerate(plan.constants) if k not in made and isinstance(same, SameTensor))
    back = [same.name for same in returned if same.kind != "output"]
    reached = plan.step.differentiable(trained)
    return Way(
        refusal="",
        step=(key_of(module, serving), number, compiler_number(), grad, plan.step.can_go_back(held.values())),
        arguments="\n".join(arguments),
        made=tuple(_place(plan, f"output.{k}", k in reached) for k in made),
        written=tuple(program.arguments.index(name) for name in program.mutated),
        back=tuple((program.arguments.index(name), _place(plan, name, False)) for name in back),
        leaves=tuple(_leaf(plan, k, made, back) for k in range(program.results)),
        constants=plan.constants,
        structure=plan.structure,
        mesh=plan.step.mesh,
    )


def _place(plan: ServedPlan, name: str, has_gradient: bool) -> _Placed:
    shape, placements = plan.step.place(name)
    return _Placed(shape, strides_of(shape), placements, has_gradient)


def _leaf(plan: ServedPlan, number: int, made: list[int], back: list[str]) -> tuple[str, int]:
    constant = plan.constants[number]
    if number in made:
        return "made", made.index(number)
    if not isinstance(constant, SameTensor):
        return "constant", number
    if constant.kind == "output":
        return "leaf", int(constant.name)
    return "back", back.index(constant.name)
