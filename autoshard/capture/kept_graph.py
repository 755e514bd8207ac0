"""A captured graph as data, to be read in the next process: what a capture of the same model would give, without it.

Nothing in it is code. Operators are named, and the structure of the model's result is that of a run of the model as it
is now (:mod:`autoshard.capture.fake_run`), so that no class is looked up by its name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec

from ..precision import Precision
from .dynamo.guards import Guards, guards_again
from .graph import CapturedGraph, Mark, Node, Ref, SameTensor, TensorMeta
from .stacks.block_guards import BlockGuards
from .stacks.blocks import FEWEST, Stack, shortened, stacks_of

_OF_TORCH = {"dtype": torch.dtype, "layout": torch.layout, "memory format": torch.memory_format}


class _NotDataError(Exception):
    """A value is none of those that can be written down."""


def written_graph(graph: CapturedGraph, structure: TreeSpec) -> bytes | None:
    """A graph as it was captured, to be read by :func:`read_graph`.

    Args:
        structure: of the model's result as its Python makes it.

    Returns:
        None where it holds what cannot be written down.
    """
    guards = graph.guards.guards if isinstance(graph.guards, BlockGuards) else graph.guards
    if guards is None or guards.document is None or graph.out_spec != structure:
        return None
    try:
        document = {
            "nodes": [_node(node) for node in graph.nodes],
            "outputs": [ref and _value(ref) for ref in graph.outputs],
            "constants": [_value(constant) for constant in graph.constants],
            "gradients": [(name, _value(ref)) for name, ref in graph.gradients],
            "mutations": [(name, _value(ref)) for name, ref in graph.mutations],
            "aliases": graph.aliases,
            "unused": [(name, _meta(meta)) for name, meta in graph.unused],
            "replaced": sorted(graph.replaced),
            "names": sorted(graph.names),
            "batch dim": graph.batch_dim,
            "guards": guards.document,
            "is short": isinstance(graph.guards, BlockGuards),
        }
        return json.dumps(document, separators=(",", ":")).encode()
    except _NotDataError:
        return None


def read_graph(data: bytes, model: nn.Module, structure: TreeSpec, precision: Precision) -> CapturedGraph | None:
    """The graph that :func:`written_graph` was given, for the same model.

    Args:
        structure: as there.
        precision: with which it was captured.

    Returns:
        None where the data is something else, or the model no longer what its guards ask for.
    """
    try:
        document = json.loads(data)
        guards = _guards(document, model)
        if guards is None:
            return None
        return CapturedGraph(
            nodes=tuple(map(_node_of, document["nodes"])),
            outputs=tuple(ref and _value_of(ref) for ref in document["outputs"]),
            constants=tuple(map(_value_of, document["constants"])),
            gradients=tuple((name, _value_of(ref)) for name, ref in document["gradients"]),
            mutations=tuple((name, _value_of(ref)) for name, ref in document["mutations"]),
            aliases=tuple((name, first) for name, first in document["aliases"]),
            unused=tuple((name, _meta_of(meta)) for name, meta in document["unused"]),
            out_spec=structure,
            replaced=frozenset(document["replaced"]),
            guards=guards,
            names=frozenset(document["names"]),
            precision=precision,
            batch_dim=int(document["batch dim"]),
        )
    except (AttributeError, KeyError, TypeError, ValueError):  # not what this version writes, of this torch
        return None


def _guards(document: dict[str, Any], model: nn.Module) -> Guards | BlockGuards | None:
    stacks: Sequence[Stack] = tuple(stacks_of(model, FEWEST)) if document["is short"] else ()
    with shortened(stacks):
        guards = guards_again(document["guards"], model)
    if guards is None or not document["is short"]:
        return guards
    found = BlockGuards(guards, model, stacks)
    return None if found.broken() else found


def _node(node: Node) -> list[Any]:
    mark = node.mark and (node.mark.region, node.mark.saved)
    outputs = [meta and _meta(meta) for meta in node.outputs]
    args, kwargs = _value(node.args), _value(node.kwargs)
    op = None if node.op is None else str(node.op)
    return [node.name, node.kind, node.phase, outputs, op, args, kwargs, node.source, mark, node.orders]


def _node_of(written: list[Any]) -> Node:
    name, kind, phase, outputs, op, args, kwargs, source, mark, orders = written
    return Node(
        name,
        kind,
        phase,
        tuple(meta and _meta_of(meta) for meta in outputs),
        None if op is None else _operator(op),
        _value_of(args),
        _value_of(kwargs),
        source,
        mark and Mark(*mark),
        tuple(map(tuple, orders)),
    )


def _operator(name: str) -> torch._ops.OpOverload:
    """An operator by its name, ``aten.mm.default``."""
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(name)
    return found


def _meta(meta: TensorMeta) -> Any:
    return meta.shape, _name(meta.dtype)


def _meta_of(written: Any) -> TensorMeta:
    shape, dtype = written
    return TensorMeta(tuple(shape), _of_torch("dtype", dtype))


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")


def _of_torch(kind: str, name: str) -> Any:
    found = getattr(torch, name)
    if not isinstance(found, _OF_TORCH[kind]):
        raise ValueError(name)
    return found


def _value(value: Any) -> Any:
    """A value as JSON has it: numbers and texts stand for themselves, others behind the name of their kind."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if isfinite(value) else ["float", repr(value)]
    if type(value) is tuple:
        return ["tuple", *map(_value, value)]
    if type(value) is list:
        return ["list", *map(_value, value)]
    if type(value) is Ref:
        return ["ref", value.node, value.output]
    if type(value) is complex:
        return ["complex", repr(value)]
    if type(value) is torch.device:
        return ["device", str(value)]
    if type(value) is SameTensor:
        return ["same", value.kind, value.name, value.is_copy]
    for kind, of_torch in _OF_TORCH.items():
        if type(value) is of_torch:
            return [kind, _name(value)]
    raise _NotDataError


def _value_of(written: Any) -> Any:
    if not isinstance(written, list):
        return written
    match written[0]:
        case "ref":
            return Ref(*written[1:])
        case "tuple":
            return tuple(map(_value_of, written[1:]))
        case "list":
            return list(map(_value_of, written[1:]))
        case "float":
            return float(written[1])
        case "complex":
            return complex(written[1])
        case "device":
            return torch.device(written[1])
        case "same":
            return SameTensor(*written[1:])
    return _of_torch(*written)
