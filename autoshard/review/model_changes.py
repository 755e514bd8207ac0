"""What is different in a model since a plan was made for it, by module path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..capture import CapturedGraph, TensorMeta
from ..constraints.names import output_name
from ..plans import ShardingPlan, TensorEntry
from ..plans.natural_order import natural_key
from ..plans.text.name_patterns import count_repeats, fold, format_pattern

CONNECTIONS = "the same tensors and operators, but other arguments, constants or connections"


@dataclass(frozen=True)
class ModelChange:
    """``count`` tensors or operators, named by ``pattern``, that were added, removed or changed as ``said``; ``first``
    is the name of the first of them, or the path of its module.
    """

    change: Literal["added", "removed", "changed"]
    kind: str
    pattern: str
    count: int
    said: str = ""
    first: str = ""

    def __str__(self) -> str:
        many = f" ({self.count})" if self.count > 1 else ""
        return f"{self.change} {self.kind} {self.pattern}{many}" + (f": {self.said}" if self.said else "")


def model_changes(plan: ShardingPlan, graph: CapturedGraph) -> tuple[ModelChange, ...]:
    """The differences: parameters first, then buffers, inputs and outputs, then operators by module.

    Empty for the model that the plan was made for, and for one that differs only as :data:`CONNECTIONS` says.
    """
    found: list[ModelChange] = []
    for kind, entries in (("parameter", plan.parameters), ("buffer", plan.buffers), ("input", plan.inputs)):
        metas = {node.name: node.outputs[0] for _, node in graph.of_kind(kind)}  # type: ignore[arg-type]
        metas |= dict(graph.unused) if kind == "parameter" else {}
        found += _tensors(kind, entries, {name: _described(meta) for name, meta in metas.items() if meta})
    outputs = {output_name(k): _described(graph.meta(ref)) for k, ref in enumerate(graph.outputs) if ref}
    found += _tensors("output", plan.outputs, outputs)
    return (*found, *_operators(plan, graph))


def _tensors(kind: str, entries: tuple[TensorEntry, ...], now: dict[str, str]) -> list[ModelChange]:
    before = {entry.name: f"{entry.dtype}{list(entry.shape)}" for entry in entries}
    values = [
        (
            name,
            ("removed", "")
            if name not in now
            else ("added", now[name])
            if name not in before
            else _change(name, before, now),
        )
        for name in sorted(before.keys() | now.keys(), key=natural_key)
        if before.get(name) != now.get(name)
    ]
    return list(_folded(kind, values))


def _change(name: str, before: dict[str, str], now: dict[str, str]) -> tuple[str, str]:
    return "changed", f"{before[name]} -> {now[name]}"


def _operators(plan: ShardingPlan, graph: CapturedGraph) -> list[ModelChange]:
    """Changes of operators, counted by module: a plan knows the names of operators and no more of them."""
    before = {entry.name for entry in plan.operators}
    now = {node.name for _, node in graph.of_kind("operator")}
    values: list[tuple[str, tuple[str, str]]] = []
    for change, names in (("removed", before - now), ("added", now - before)):
        modules: dict[str, list[str]] = {}
        for name in sorted(names, key=natural_key):
            module, _, role = name.partition("/")
            modules.setdefault(module, []).append(role)
        values += [(module, (change, ", ".join(roles))) for module, roles in modules.items()]
    return list(_folded("operators of", sorted(values, key=lambda item: natural_key(item[0]))))


def _folded(kind: str, values: list[tuple[str, tuple[str, str]]]) -> Iterator[ModelChange]:
    repeats = count_repeats(name for name, _ in values)
    for line in fold(values):
        change, said = line.value
        pattern = format_pattern(line.pattern, repeats) or "the model itself"
        yield ModelChange(change, kind, pattern, line.pattern.count, said, line.pattern.names()[0])  # type: ignore[arg-type]


def _described(meta: TensorMeta) -> str:
    return f"{str(meta.dtype).removeprefix('torch.')}{list(meta.shape)}"
