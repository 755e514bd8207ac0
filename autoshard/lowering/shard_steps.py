"""Optimizers step this rank's shards.

An operator on a DTensor costs the host four times what it costs on a plain tensor, and nine times where it takes a
Python number, which torch describes as a DTensor too: a third of AdamW's time for the demo Llama on a CPU. An optimizer
that treats all elements alike does to a shard what it does to the whole, so a stand-in of it, which holds shards, takes
the step: the parameters, gradients and state of the optimizer itself stay the DTensors that they are, in the same
memory.

Whether a step is left out, as a gradient scaler has it where it finds an inf, all ranks decide alike.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .adapter import agree_on_infinities, dtensor_of, known_as, local_of, next_to_step

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD),
    *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.SGD),
)
"""Optimizers whose step does to an element what does not depend on others, and changes its state in place. Classes made
from them may do more.
"""

_MODULES: WeakSet[nn.Module] = WeakSet()
_OURS: WeakKeyDictionary[optim.Optimizer, tuple[int, bool]] = WeakKeyDictionary()
"""Whether all DTensors of an optimizer, of so many parameters, are parameters of these modules."""


def step_shards_of(module: nn.Module) -> None:
    """From here on, optimizers of a parallel module's parameters step shards where that is the same, on all ranks or on
    none.
    """
    _MODULES.add(module)
    _register()


@cache
def _register() -> None:
    agree_on_infinities()
    register_optimizer_step_pre_hook(_prepare)


def _prepare(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Has the stand-in made behind all hooks of the user's before the step, which may change groups and gradients, and
    gone before those after it.
    """
    if type(optimizer) in ELEMENTWISE and not torch.compiler.is_compiling():
        next_to_step(optimizer, _with_stand_in, _without_stand_in)


def _with_stand_in(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    """The arguments of the step, the first of which is the optimizer, with a stand-in in its place; None where the
    optimizer itself has to step. A closure is among the latter: it makes gradients within the step.
    """
    if args[:1] != (optimizer,):
        return None
    if any(value is not None for value in (*args[1:], *kwargs.values())) or not _is_ours(optimizer):
        return None
    stand_in = _stand_in(optimizer)
    return None if stand_in is None else ((stand_in, *args[1:]), kwargs)


def _without_stand_in(optimizer: optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Has whoever is given the arguments of the step find the optimizer's own groups and state there, with what the
    step has made.
    """
    if args[0] is not optimizer:
        _take_over(optimizer, args[0])
        args[0].__dict__ = optimizer.__dict__


def _take_over(optimizer: optim.Optimizer, stand_in: optim.Optimizer) -> None:
    """Gives the optimizer the state that the step has made. Where a kernel left the step out, as a gradient scaler has
    it, nothing was written into that.
    """
    made = []
    for group, theirs in zip(optimizer.param_groups, stand_in.param_groups, strict=True):
        stepped = (parameter for parameter in group["params"] if parameter.grad is not None)
        for parameter, shard in zip(stepped, theirs["params"], strict=True):
            had = {key for key, value in optimizer.state.get(parameter, {}).items() if value is not None}
            has = ((key, value) for key, value in stand_in.state[shard].items() if value is not None)
            made += [(parameter, key, value) for key, value in has if key not in had]
    found_inf = getattr(stand_in, "found_inf", None)
    if made and found_inf is not None and found_inf.item():
        return
    for parameter, key, value in made:
        spec = known_as(parameter.grad)
        optimizer.state[parameter][key] = value if spec is None else dtensor_of(value, spec)


def _is_ours(optimizer: optim.Optimizer) -> bool:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    known = _OURS.get(optimizer)
    if known is None or known[0] != len(parameters):
        ours = {id(p) for module in _MODULES for p in module.parameters()}
        sharded = [p for p in parameters if isinstance(p, DTensor)]
        known = len(parameters), bool(sharded) and all(id(p) in ours for p in sharded)
        _OURS[optimizer] = known
    return known[1]


def _stand_in(optimizer: optim.Optimizer) -> optim.Optimizer | None:
    """The optimizer with shards in the place of DTensors. None where it has no state yet, or not all of it, which it
    makes as DTensors, or where a gradient or a state is placed otherwise than its parameter. SGD makes its state of
    gradients, and has none without momentum.
    """
    groups: list[dict[str, Any]] = []
    state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return None
        shards = []
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            held = optimizer.state.get(parameter, {})
            made = [value for value in held.values() if isinstance(value, Tensor)]
            if type(optimizer) is not optim.SGD and (not held or len(made) < len(held)):
                return None
            if not _are_alike(parameter, parameter.grad, *made):
                return None
            shard = local_of(parameter).detach()  # a tensor of its own: its gradient is let go of with it
            shard.grad = local_of(parameter.grad)
            state[shard] = {key: local_of(value) for key, value in held.items()}
            shards.append(shard)
        groups.append(group | {"params": shards})
    stand_in: optim.Optimizer = object.__new__(type(optimizer))
    stand_in.__dict__.update(optimizer.__dict__, param_groups=groups, state=state)
    return stand_in


def _are_alike(parameter: Tensor, gradient: Tensor, *states: Tensor) -> bool:
    """Whether what is a DTensor among these is placed as the parameter is, and no sum is open."""
    if gradient.dtype != parameter.dtype:
        return False
    spec = known_as(parameter)
    if spec is None:
        return not any(isinstance(other, DTensor) for other in (gradient, *states))
    for other in (gradient, *states):
        said = known_as(other)
        if said is not None:
            if said is spec:
                continue
            is_on_mesh = said.mesh is spec.mesh or said.mesh == spec.mesh
            if not is_on_mesh or said.placements != spec.placements:
                return False
        elif other.dim() > 0:
            return False
    return not any(placement.is_partial() for placement in spec.placements)
