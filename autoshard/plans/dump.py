"""A plan as the text of its file: one decision per line, identical layers folded, equal bytes for equal plans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ..errors import PlanFileError
from ..layout import format_layout
from ..mesh import Mesh
from .folding import Line, Pattern, Repeats, count_repeats, fold, fold_in_order, format_pattern, starred
from .memory import MemoryOutcome, MemoryPoint, MemoryTenant
from .notation import (
    MAX_SECONDS,
    check_operator,
    check_redistribution,
    check_tensor,
    format_collective,
    format_path,
    format_strategy,
)
from .plan import OperatorEntry, Phase, Redistribution, ShardingPlan, TensorEntry
from .schema import FORMAT_VERSION
from .yaml_text import number, quote, quote_key

_NOTATION = """\
# Sharding plan of autoshard: which rank holds which part of each tensor, and what is communicated. docs/plan_file.md
# layout        one entry per mesh axis: R every rank holds the whole, S(0) dim 0 is cut, P(sum) ranks hold addends
# layers.*      every layer, as many as repeats says; layers.{1-31} and layers.{0,3-5} are some; count, x4: how many
# operators     module path/role: layouts of its inputs -> layouts of its outputs (- is no tensor)
# redistributions   layouts a tensor goes through; collectives: kind, mesh axis, bytes of one rank, predicted time
#               kept: not done again, the backward reads what the forward made
# memory        bytes of the rank with the largest shards: what is held, the fullest moment, the course of one step
"""

_PHASES: tuple[Phase, ...] = ("forward", "backward")


@dataclass(frozen=True)
class FoldedPlan:
    """A plan's entries as lines: what the file holds, and what tables for people show.

    The value of a line is an entry whose own name is left empty. ``repeats`` names the paths written with ``*``.
    """

    repeats: Repeats
    parameters: list[Line[TensorEntry]]
    buffers: list[Line[TensorEntry]]
    inputs: list[Line[TensorEntry]]
    outputs: list[Line[TensorEntry]]
    forward: list[Line[OperatorEntry]]
    backward: list[Line[OperatorEntry]]
    redistributions: list[Line[Redistribution]]


def fold_plan(plan: ShardingPlan) -> FoldedPlan:
    """Folds identical layers."""
    tensors = (plan.parameters, plan.buffers, plan.inputs, plan.outputs)
    names = [entry.name for entries in (*tensors, plan.operators) for entry in entries]
    seen = count_repeats([*names, *(entry.tensor for entry in plan.redistributions)])

    parameters, buffers = (fold(_nameless(entries)) for entries in tensors[:2])
    inputs, outputs = (fold_in_order(_nameless(entries)) for entries in tensors[2:])
    forward, backward = (
        fold([(e.name, replace(e, name="")) for e in plan.operators if e.phase == phase]) for phase in _PHASES
    )
    redistributions = [
        line
        for phase in _PHASES
        for line in fold([(e.tensor, replace(e, tensor="")) for e in plan.redistributions if e.phase == phase])
    ]
    used = {
        prefix
        for pattern in _patterns(parameters, buffers, inputs, outputs, forward, backward, redistributions)
        for prefix in starred(pattern, seen)
    }
    repeats = {prefix: seen[prefix] for prefix in sorted(used)}
    return FoldedPlan(repeats, parameters, buffers, inputs, outputs, forward, backward, redistributions)


def _nameless(entries: Iterable[TensorEntry]) -> list[tuple[str, TensorEntry]]:
    return [(entry.name, replace(entry, name="")) for entry in entries]


def _patterns(*sections: Iterable[Line[Any]]) -> Iterator[Pattern]:
    return (line.pattern for section in sections for line in section)


def dump_plan(plan: ShardingPlan) -> str:
    """The text of a plan file; :func:`~autoshard.plans.parse.parse_plan` gives back an equal plan.

    Its number of lines does not depend on how many identical layers the model has.

    Raises:
        PlanFileError: two entries have one name, an entry does not fit the mesh or its own shape, or a time or the gap
            is no finite number or below 0.
    """
    _check(plan)
    return _NOTATION + "\n" + "\n".join(_render(plan, fold_plan(plan))) + "\n"


def _check(plan: ShardingPlan) -> None:
    for what, keys in (
        ("parameters", [e.name for e in plan.parameters]),
        ("buffers", [e.name for e in plan.buffers]),
        ("inputs", [e.name for e in plan.inputs]),
        ("outputs", [e.name for e in plan.outputs]),
        ("operators", [(e.phase, e.name) for e in plan.operators]),
        ("redistributions", [(e.phase, e.tensor, e.path) for e in plan.redistributions]),
    ):
        if len(set(keys)) != len(keys):
            twice = next(key for key, count in Counter(keys).items() if count > 1)
            raise PlanFileError(f"the plan cannot be written: its {what} name {twice!r} twice")
    for what, value in (
        ("gap", plan.solver.gap),
        ("compute_s", plan.compute_s),
        ("communication_s", plan.communication_s),
    ):
        if not math.isfinite(value) or (what != "gap" and not 0 <= value <= MAX_SECONDS):
            raise PlanFileError(f"the plan cannot be written: its {what} is {value}")
    for tensor in (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs):
        with _naming(tensor.name):
            check_tensor(tensor, plan.mesh)
    for operator in plan.operators:
        with _naming(operator.name):
            check_operator(operator, plan.mesh)
    for redistribution in plan.redistributions:
        with _naming(redistribution.tensor):
            check_redistribution(redistribution, plan.mesh)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise PlanFileError(f"the plan cannot be written: {name!r}: {error}") from None


def _render(plan: ShardingPlan, folded: FoldedPlan) -> Iterator[str]:
    mesh, repeats = plan.mesh, folded.repeats
    yield from _header(plan)
    if plan.memory is not None:
        yield ""
        yield from _memory(plan.memory)
    yield ""
    yield from _section("repeats", [f"{quote_key(prefix)}: {count}" for prefix, count in repeats.items()])
    for title, tensors in (
        ("parameters", folded.parameters),
        ("buffers", folded.buffers),
        ("inputs", folded.inputs),
        ("outputs", folded.outputs),
    ):
        yield ""
        yield from _section(title, [_tensor_line(line, mesh, repeats) for line in tensors])
    yield ""
    yield "operators:"
    for title, operators in (("forward", folded.forward), ("backward", folded.backward)):
        lines = _section(title, [_operator_line(line, mesh, repeats) for line in operators])
        yield from (f"  {line}" for line in lines)
    yield ""
    yield from _section(
        "redistributions", [_redistribution_line(line, mesh, repeats) for line in folded.redistributions], empty="[]"
    )
    yield ""
    yield from _totals(plan)


def _header(plan: ShardingPlan) -> Iterator[str]:
    yield f"autoshard_plan: {FORMAT_VERSION}"
    yield f"model: {quote(plan.model)}"
    yield f"fingerprint: {quote(plan.fingerprint)}"
    yield f"call: {quote(plan.call)}"
    yield f'mesh: "{plan.mesh}"'
    yield f"hardware: {{name: {quote(plan.hardware)}, fingerprint: {quote(plan.hardware_fingerprint)}}}"
    yield f"objective: {quote(plan.objective)}"
    yield from _section("pins", [f"- {quote(pin)}" for pin in plan.pins], empty="[]")
    yield "result:"
    yield f"  status: {quote(plan.solver.status)}"
    yield f"  cost_ns: {plan.solver.cost_ns}"
    yield f"  bound_ns: {plan.solver.bound_ns}"
    yield f"  gap: {number(plan.solver.gap)}"
    yield f"  compute_s: {number(plan.compute_s)}"
    yield f"  communication_s: {number(plan.communication_s)}"


def _memory(memory: MemoryOutcome) -> Iterator[str]:
    yield "memory:"
    yield f"  optimizer: {quote(memory.optimizer)}"
    if memory.budget_bytes is not None:
        yield f"  budget_bytes: {memory.budget_bytes}"
    if memory.soft_ms_per_gib is not None:
        yield f"  soft_ms_per_gib: {number(memory.soft_ms_per_gib)}"
    static = ("parameters", "gradients", "optimizer", "buffers", "inputs")
    sizes = (getattr(memory, f"{name.removesuffix('s')}_bytes") for name in static)
    yield f"  static_bytes: {{{', '.join(f'{name}: {size}' for name, size in zip(static, sizes))}}}"
    yield f"  peak: {_point(memory.peak)}"
    yield from (f"  {line}" for line in _section("tenants", [f"- {_tenant(t)}" for t in memory.tenants], empty="[]"))
    yield f"  other_bytes: {memory.other_bytes}"
    yield from (f"  {line}" for line in _section("timeline", [f"- {_point(p)}" for p in memory.timeline], empty="[]"))


def _point(point: MemoryPoint) -> str:
    return f"{{phase: {point.phase}, operator: {quote(point.operator)}, bytes: {point.size_bytes}}}"


def _tenant(tenant: MemoryTenant) -> str:
    name, size = quote(tenant.name), tenant.size_bytes
    return f"{{name: {name}, kind: {tenant.kind}, count: {tenant.count}, bytes: {size}}}"


def _section(title: str, lines: list[str], empty: str = "{}") -> Iterator[str]:
    yield f"{title}:" if lines else f"{title}: {empty}"
    yield from (f"  {line}" for line in lines)


def _tensor_line(line: Line[TensorEntry], mesh: Mesh, repeats: Repeats) -> str:
    entry = line.value
    fields = [
        f'layout: "{format_layout(entry.layout, mesh)}"',
        f"shape: [{', '.join(map(str, entry.shape))}]",
        f"dtype: {quote(entry.dtype)}",
        *_count(line.pattern.count),
    ]
    return f"{quote_key(format_pattern(line.pattern, repeats))}: {{{', '.join(fields)}}}"


def _operator_line(line: Line[OperatorEntry], mesh: Mesh, repeats: Repeats) -> str:
    key = quote_key(format_pattern(line.pattern, repeats))
    return f'{key}: "{format_strategy(line.value, mesh, line.pattern.count)}"'


def _redistribution_line(line: Line[Redistribution], mesh: Mesh, repeats: Repeats) -> str:
    entry = line.value
    pattern = format_pattern(line.pattern, repeats)
    quote_key(pattern)  # the same limit on its length as where it is a key
    fields = [
        f"tensor: {quote(pattern)}",
        f"phase: {entry.phase}",
        f'path: "{format_path(entry.path, mesh)}"',
        f"collectives: [{', '.join(quote(format_collective(c)) for c in entry.collectives)}]",
        *(["kept: true"] if entry.kept else []),
        *_count(line.pattern.count),
    ]
    return f"- {{{', '.join(fields)}}}"


def _count(count: int) -> list[str]:
    return [f"count: {count}"] if count > 1 else []


def _totals(plan: ShardingPlan) -> Iterator[str]:
    yield "# Entries after unfolding. This line ends the file: a file without it was cut short."
    sections = ("parameters", "buffers", "inputs", "outputs", "operators", "redistributions")
    yield f"totals: {{{', '.join(f'{section}: {len(getattr(plan, section))}' for section in sections)}}}"
