"""The local form of an operator: what runs on one rank's shards.

For most operators it is the operator itself. The numeric check of the rules executes these forms and lowering emits
them.
"""

from __future__ import annotations

from typing import Any

import torch

from ..capture import Node, Ref, map_refs
from ..layout import Layout, local_shape
from ..mesh import Mesh
from .operator import Caller, Local, LocalCall, Metas, known

aten = torch.ops.aten


def run_local(
    caller: Caller,
    node: Node,
    values: tuple[Any, ...],
    metas: Metas,
    inputs: tuple[Layout, ...],
    outputs: tuple[Layout | None, ...],
    mesh: Mesh,
    coordinate: tuple[int, ...],
    device: torch.device | None = None,
) -> Any:
    """Runs an operator on one rank's shards.

    Args:
        values: the shard of each tensor argument, in argument order.
        metas: global shape and dtype of each tensor argument.
        inputs, outputs: the layouts of the strategy.
        device: replaces every device among the arguments.

    Returns:
        What the operator returns, on shards: one value, or a tuple where it has several results.
    """
    supply = iter(values)
    args: tuple[Any, ...] = map_refs(node.args, lambda _: next(supply))
    kwargs = {key: map_refs(value, lambda _: next(supply)) for key, value in node.kwargs}
    if device is not None:
        kwargs = {key: device if isinstance(value, torch.device) else value for key, value in kwargs.items()}
    local = known(node.op).local
    if local is None:
        return caller.call(node.op, *args, **kwargs)
    return local(LocalCall(caller, node, args, kwargs, metas, inputs, outputs, mesh, coordinate))


def with_local_size(position: int, op: Any = None) -> Local:
    """The local form of an operator whose argument at this position is the shape of the result; ``op`` runs instead."""

    def local(call: LocalCall) -> Any:
        meta, layout = call.node.outputs[0], call.outputs[0]
        assert meta is not None and layout is not None
        size = local_shape(meta.shape, layout, call.mesh, call.coordinate)
        return call.run(op or call.node.op, *call.args[:position], size, *call.args[position + 1 :], **call.kwargs)

    return local


def on_contiguous(*places: int) -> Local:
    """The local form of an operator that runs on contiguous copies of its tensors at some places, however these lie in
    memory. It wants that, or its kernel makes them, while torch says of the result, where it has no values, that it
    lies as they do.
    """

    def local(call: LocalCall) -> Any:
        args = list(call.args)
        for place in places:
            args[place] = call.run(aten.contiguous.default, args[place])
        return call.run(call.node.op, *args, **call.kwargs)

    return local


def on_rows(*, or_alike: bool = True) -> Local:
    """The local form of an operator whose result torch says, where it has no values, to lie otherwise in memory than
    what its kernel makes, but where the dims of all tensors lie in their order: it runs on contiguous copies elsewhere.

    Args:
        or_alike: torch is right, too, where all tensors lie alike.
    """

    def local(call: LocalCall) -> Any:
        places = [place for place, arg in enumerate(call.node.args) if isinstance(arg, Ref)]
        args = list(call.args)
        for place, x in zip(places, in_rows(call, *(args[place] for place in places), or_alike=or_alike)):
            args[place] = x
        return call.run(call.node.op, *args, **call.kwargs)

    return local


def in_rows(call: LocalCall, *tensors: Any, or_alike: bool) -> tuple[Any, ...]:
    """Tensors, contiguous unless the dims of all lie in their order, or (``or_alike``) all lie alike."""
    looks = [call.caller.value(x) for x in tensors]
    if all(map(_is_in_order, looks)) or (or_alike and len({x.stride() for x in looks}) == 1):
        return tensors
    return tuple(call.run(aten.contiguous.default, x) for x in tensors)


def _is_in_order(x: torch.Tensor) -> bool:
    """Whether no dim lies inside of one behind it; one along which numbers are repeated lies nowhere."""
    steps = [step for size, step in zip(x.shape, x.stride()) if size > 1 and step]
    return steps == sorted(steps, reverse=True)
