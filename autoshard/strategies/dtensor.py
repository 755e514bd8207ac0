"""DTensor's own sharding rules. The private torch APIs that strategies need are all in this file (torch 2.11 to 2.13).

The same operator moves between two registries from version to version: ``op_single_dim_strategy_funcs`` (rules for one
axis, independent of the mesh) and ``op_strategy_funcs`` (strategies for a mesh; asked here for a mesh of one axis).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as DTensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, RuntimeSchemaInfo, TupleStrategy

from ..capture import Node, Ref, TensorMeta
from ..layout import P, Placement, R, S
from ..ops import Rule, has


def dtensor_rules(node: Node, inputs: tuple[TensorMeta, ...], parts: int) -> list[Rule]:
    """The rules DTensor has for an operator on an axis of ``parts`` ranks; empty where it has none.

    Rules that use placements autoshard does not have (strided shards, masked partials) are left out.
    """
    op = node.op
    propagator = DTensor._op_dispatcher.sharding_propagator
    if op in propagator.op_single_dim_strategy_funcs:
        rows = _single_dim_rows(propagator.op_single_dim_strategy_funcs[op], node, inputs)
    elif op in propagator.op_strategy_funcs:
        rows = _mesh_rows(propagator.op_strategy_funcs[op], node, inputs, parts)
    else:
        return []
    found = (_rule(row, node, inputs) for row in rows)
    return list(dict.fromkeys(rule for rule in found if rule is not None))


def dtensor_function(op: Any) -> object:
    """What DTensor asks for the rules of an operator; None where it has none. ``register_sharding`` changes it."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    for registry in (propagator.op_single_dim_strategy_funcs, propagator.op_strategy_funcs):
        if op in registry:
            return getattr(registry[op], "func", registry[op])
    return None


@cache
def _planning_mesh(parts: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(parts), mesh_dim_names=("axis",), _init_backend=False, _rank=0)


def _dtensor_meta(meta: TensorMeta) -> DTensorMeta:
    strides = torch.empty(meta.shape, device="meta").stride()
    return DTensorMeta(torch.Size(meta.shape), strides, meta.dtype)


def _single_dim_rows(info: Any, node: Node, inputs: tuple[TensorMeta, ...]) -> Iterable[list[Any]]:
    rule = getattr(info, "func", info)
    metas = iter(inputs)

    def convert(value: Any) -> Any:
        if isinstance(value, Ref):
            return _dtensor_meta(next(metas))
        return [convert(item) for item in value] if isinstance(value, tuple) else value

    args = tuple(convert(arg) for arg in node.args)
    try:
        return rule(node.op, args, {key: convert(value) for key, value in node.kwargs})  # type: ignore[no-any-return]
    except Exception:  # torch's rules raise anything on arguments they do not expect; no rule is then offered
        return []


def _mesh_rows(strategy: Any, node: Node, inputs: tuple[TensorMeta, ...], parts: int) -> Iterable[list[Any]]:
    """Asks for all candidate layouts at once, or, where a rule fails on one bad candidate, for each alone.

    Then for inputs of one rank cut alike beside whole ones (the weights of a norm), which some rules need to be shown.
    """
    mesh = _planning_mesh(parts)
    candidates = [[Replicate(), *(Shard(d) for d in range(len(m.shape))), Partial("sum")] for m in inputs]
    widest = max((len(c) for c in candidates), default=0)
    candidates = [c + [Replicate()] * (widest - len(c)) for c in candidates]
    alone = [[[c[k]] for c in candidates] for k in range(widest)]
    only_alike = [
        [[c[k] if len(m.shape) == len(inputs[0].shape) else Replicate()] for c, m in zip(candidates, inputs)]
        for k in range(widest)
    ]

    def ask(trial: list[list[Any]]) -> list[list[Any]]:
        found = _strategies_of(strategy, _schema(node, inputs, mesh, trial))
        return [_spec_row(spec, len(node.outputs)) for spec in found]

    rows = ask(candidates)
    for trial in only_alike if rows else [*alone, *only_alike]:
        rows += ask(trial)
    return rows


def _strategies_of(strategy: Any, schema: OpSchema) -> list[OpSpec]:
    try:
        return strategy(schema).strategies  # type: ignore[no-any-return]
    except Exception:  # as above
        return []


def _schema(node: Node, inputs: tuple[TensorMeta, ...], mesh: DeviceMesh, candidates: list[list[Any]]) -> OpSchema:
    position = iter(range(len(inputs)))

    def convert(value: Any) -> Any:
        if isinstance(value, Ref):
            k = next(position)
            meta = _dtensor_meta(inputs[k])
            return OpStrategy([OpSpec(DTensorSpec(mesh, (p,), tensor_meta=meta)) for p in candidates[k]])
        if isinstance(value, tuple):
            items = [convert(item) for item in value]
            return TupleStrategy(tuple(items)) if any(isinstance(i, OpStrategy) for i in items) else items
        return value

    args = tuple(convert(arg) for arg in node.args)
    kwargs = {key: convert(value) for key, value in node.kwargs}
    return OpSchema(node.op, args, kwargs, RuntimeSchemaInfo(needs_pytree=True))  # type: ignore[arg-type]


def _spec_row(spec: OpSpec, output_count: int) -> list[Any]:
    """Output placements, then input placements, along the one axis. One output spec may stand for all outputs."""
    several = isinstance(spec.output_specs, (tuple, list))
    outputs = tuple(spec.output_specs) if several else (spec.output_specs,) * output_count  # type: ignore[arg-type]
    inputs = spec.input_specs if spec.input_specs is not None else outputs[:1]
    return [None if s is None else s.placements[0] for s in (*outputs, *inputs)]


def _rule(row: list[Any], node: Node, metas: tuple[TensorMeta, ...]) -> Rule | None:
    output_count = len(node.outputs)
    if len(row) != output_count + len(metas):
        return None
    is_mean = has(node, "mean")
    placements = [_placement(p, is_mean) for p in row]
    outputs = tuple(None if meta is None else p for p, meta in zip(placements, node.outputs))
    present = all((p is None) == (meta is None) for p, meta in zip(outputs, node.outputs))
    inputs = tuple(p for p in placements[output_count:] if p is not None)
    # a tensor still to be combined by max or min is combined before anything reads it
    known = len(inputs) == len(metas) and all(p.reduce in ("", "sum") for p in inputs)
    return Rule(inputs, outputs) if present and known and _has_dims(inputs + outputs, metas + node.outputs) else None


def _has_dims(placements: tuple[Placement | None, ...], metas: tuple[TensorMeta | None, ...]) -> bool:
    """Whether every cut dim exists; some rules cut scalars."""
    pairs = zip(placements, metas)
    return all(p is None or meta is None or p.kind != "S" or 0 <= p.dim < len(meta.shape) for p, meta in pairs)


def _placement(placement: Any, is_mean: bool) -> Placement | None:
    if type(placement) is Replicate:
        return R
    if type(placement) is Shard or type(placement).__name__ == "_ShardingPlaceholder":
        return S(placement.dim)
    if type(placement) is Partial:
        # a mean of equal shards averages; our local form of a mean adds up shards of any size instead
        reduce = "sum" if placement.reduce_op == "avg" and is_mean else placement.reduce_op
        return P(reduce) if reduce in ("sum", "max", "min") else None
    return None
