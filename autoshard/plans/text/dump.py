"""A plan as the text of its file: one decision per line, identical layers folded, equal bytes for equal plans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...errors import PlanFileError
from ...layout import format_layout
from ...mesh import Mesh
from ...precision import AS_IT_IS
from ..expert_distance import ExpertDistance, PartDifference, TensorDifference
from ..memory_outcome import MemoryKind, MemoryOutcome, MemoryPoint, MemorySaved, MemoryTenant
from ..plan import PHASES, OperatorEntry, Redistribution, ShardingPlan, TensorEntry
from .contradictions import Contradiction, check_decisions, check_record
from .execution_order import Block, Loop, check_execution, format_loop, format_ns
from .folded_plan import FoldedPlan, fold_plan, folded_execution
from .layer_relative import written_for
from .layout_preserving import group_layout_preserving, preserves_layout, split_role
from .name_patterns import Line, Repeats, format_pattern
from .notation import (
    MAX_SECONDS,
    check_operator,
    check_tensor,
    format_collective,
    format_path,
    format_strategy,
)
from .schema import FORMAT_VERSION
from .yaml_text import number, quote, quote_flow_key, quote_key

_NOTATION = """\
# Sharding plan of autoshard: which rank holds which part of each tensor, and what is communicated. docs/plan_file.md
# layout        one entry per mesh axis: R every rank holds the whole, S(0) dim 0 is cut, P(sum) ranks hold addends
# result        what the bound proves of the cost; identical_layers alike: among plans that decide such layers alike
# layers.*      every layer, as many as repeats says; layers.{1-31} and layers.{0,3-5} are some; count, x4: how many
# operators     module path/role: layouts of its inputs -> layouts of its outputs (- is no tensor)
# redistributions   layouts a tensor goes through; collectives: kind, mesh axis, bytes of one rank, predicted time;
#               for: who wants the last layout, where layers.* is the layer of the tensor and layers.*+1 the next
#               shared: so many first steps are those of another line of the tensor, and run once
#               kept: not done again, the backward reads what the forward made
# memory        bytes of the rank with the largest shards: what is held, the fullest moment, the course of one step
# network       what each mesh axis runs on; ranks: their order, where the last axis does not count fastest
# followers     operators that keep the layout of their first input: nothing is decided there
# execution     the order on one rank: module, roles, predicted milliseconds; loops over layers
"""

_NOTATION_OF_PARTS = """\
# S(0/3)        dim 0 has three equal parts, each of which is cut; S(0/4:1:1): three of these proportions
"""

_NOTATION_OF_BUCKETS = """\
# bucket_bytes  so much at most travels together: parameters are gathered a layer ahead, gradients reduced in buckets
"""

_NOTATION_OF_DEFERRED = """\
# deferred      is waited for and run when the caller reads such a result, at the latest as the backward ends
"""

_NOTATION_OF_PRECISION = """\
# param_dtype   the step computes with cast_W, the cast of W; gradients are reduced in reduce_dtype: to_reduce_W is the
#               gradient cast before that, reduced_W behind it
"""

_NOTATION_OF_SEVERAL = """\
# micro_batches   forwards and backwards of a step; shapes, times and redistributions are those of one of them
#               held_W: the copy of W for the step, summed_W: the sum of its gradients; to held_W and from summed_W once
"""

_NOTATION_OF_STEPS_FIRST = """\
# batch_dim     the batch is dim 1 of what the model is called with, behind the steps
"""


POINTS_PER_LINE = 8
"""Moments of the memory's timeline on one line of the file."""


def dump_plan(plan: ShardingPlan) -> str:
    """The text of a plan file; :func:`~autoshard.plans.text.parse.parse_plan` gives back an equal plan.

    Its number of lines does not depend on how many identical layers the model has.

    Raises:
        PlanFileError: two entries have one name, an entry does not fit the mesh or its own shape, a time or the gap is
            no finite number or below 0, or the plan contradicts itself (:mod:`autoshard.plans.text.contradictions`).
    """
    if plan.left_out:
        raise PlanFileError("the plan cannot be written: it lacks layers, and only stands for that of all of them")
    # what hides depends on the whole schedule
    short = plan if plan.objective == "overlapped-step-time" else plan.shortened()
    _check(short)
    notation = _NOTATION
    notation += _NOTATION_OF_PARTS if _has_parts(short) else ""
    notation += _NOTATION_OF_BUCKETS if plan.bucket_bytes else ""
    notation += _NOTATION_OF_DEFERRED if plan.deferred else ""
    notation += _NOTATION_OF_PRECISION if plan.precision != AS_IT_IS else ""
    notation += _NOTATION_OF_SEVERAL if plan.micro_batches > 1 else ""
    notation += _NOTATION_OF_STEPS_FIRST if plan.batch_dim else ""
    return notation + "\n" + "\n".join(_render(plan, fold_plan(plan))) + "\n"


def _has_parts(plan: ShardingPlan) -> bool:
    """Whether some operator takes, or makes, a tensor with a dim of which each part is cut."""
    alike = {(entry.inputs, entry.outputs) for entry in plan.operators}
    return any(layout is not None and layout.has_parts for each in alike for layouts in each for layout in layouts)


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
        ("optimizer_s", plan.optimizer_s or 0.0),
        ("at_peak_s", plan.at_peak_s or 0.0),
        *_times(plan.against),
    ):
        if not math.isfinite(value) or (what != "gap" and not 0 <= value <= MAX_SECONDS):
            raise PlanFileError(f"the plan cannot be written: its {what} is {value}")
    for tensor in (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs):
        with _naming(tensor.name):
            check_tensor(tensor, plan.mesh)
    alike = {(operator.inputs, operator.outputs): operator for operator in reversed(plan.operators)}
    for operator in reversed(alike.values()):
        with _naming(operator.name):
            check_operator(operator, plan.mesh)
    try:
        check_execution(plan.execution, plan.operators)
    except ValueError as error:
        raise PlanFileError(f"the plan cannot be written: {error}") from None
    try:
        check_record(plan)
        check_decisions(plan)
    except Contradiction as error:
        raise PlanFileError(f"the plan cannot be written: {error}") from None


def _times(against: ExpertDistance | None) -> Iterator[tuple[str, float]]:
    """Every time of a distance, by what it is called."""
    if against is not None:
        yield from ((name, getattr(against, name)) for name in ("compute_s", "communication_s", "optimizer_s"))
        differences: tuple[PartDifference | TensorDifference, ...] = (*against.parts, *against.tensors)
        for each in differences:
            yield from (("ours_s", each.ours_s), ("theirs_s", each.theirs_s))


@contextmanager
def _naming(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise PlanFileError(f"the plan cannot be written: {name!r}: {error}") from None


def _render(plan: ShardingPlan, folded: FoldedPlan) -> Iterator[str]:
    mesh, repeats = plan.mesh, folded.repeats
    yield from _header(plan)
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
    decide = [
        [_operator_line(line, mesh, repeats) for line in lines if not preserves_layout(line.value)]
        for lines in (folded.forward, folded.backward)
    ]
    yield from _by_phase("operators", decide)
    yield ""
    yield from _section(
        "redistributions", [_redistribution_line(line, mesh, repeats) for line in folded.redistributions], empty="[]"
    )
    if plan.memory is not None:
        yield ""
        yield from _memory(plan.memory)
    yield ""
    followers = [
        [_follower_line(group, mesh, repeats) for group in group_layout_preserving(lines)]
        for lines in (folded.forward, folded.backward)
    ]
    yield from _by_phase("followers", followers, empty="[]")
    yield ""
    yield from _by_phase("execution", [list(_block(block)) for block in folded_execution(plan)], empty="[]")
    yield ""
    yield from _totals(plan)


def _header(plan: ShardingPlan) -> Iterator[str]:
    yield f"autoshard_plan: {FORMAT_VERSION}"
    yield f"model: {quote(plan.model)}"
    yield f"fingerprint: {quote(plan.fingerprint)}"
    yield f"call: {quote(plan.call)}"
    yield f'mesh: "{plan.mesh}"'
    if plan.mesh.order:
        yield f"ranks: [{', '.join(map(str, plan.mesh.order))}]"
    if plan.network:
        pairs = zip(plan.mesh.axes, plan.network, strict=True)
        yield from _section("network", [f"{quote_key(axis)}: {quote(words)}" for axis, words in pairs])
    contention = "" if plan.contention == 1 else f", contention: {number(plan.contention)}"
    yield f"hardware: {{name: {quote(plan.hardware)}, fingerprint: {quote(plan.hardware_fingerprint)}{contention}}}"
    yield f"objective: {quote(plan.objective)}"
    yield from _section("pins", [f"- {quote(pin)}" for pin in plan.pins], empty="[]")
    if plan.micro_batches > 1:
        yield f"micro_batches: {plan.micro_batches}"
    if plan.batch_dim:
        yield f"batch_dim: {plan.batch_dim}"
    if plan.bucket_bytes:
        yield f"bucket_bytes: {plan.bucket_bytes}"
    if not plan.gathers_ahead:
        yield "gathers_ahead: false"
    if plan.deferred:
        yield f"deferred: [{', '.join(map(quote, plan.deferred))}]"
    if plan.precision.param_dtype:
        yield f"param_dtype: {plan.precision.param_dtype}"
    if plan.precision.reduce_dtype:
        yield f"reduce_dtype: {plan.precision.reduce_dtype}"
    yield "result:"
    yield f"  status: {quote(plan.solver.status)}"
    yield f"  identical_layers: {plan.solver.identical_layers}"
    if plan.solver.layer_groups:
        yield "  layer_groups:"
        yield from (f"    - {quote(group)}" for group in plan.solver.layer_groups)
    yield f"  cost_ns: {plan.solver.cost_ns}"
    yield f"  bound_ns: {plan.solver.bound_ns}"
    yield f"  gap: {number(plan.solver.gap)}"
    yield f"  compute_s: {number(plan.compute_s)}"
    yield f"  communication_s: {number(plan.communication_s)}"
    if plan.optimizer_s is not None:
        yield f"  optimizer_s: {number(plan.optimizer_s)}"
    if plan.at_peak_s is not None:
        yield f"  at_peak_s: {number(plan.at_peak_s)}"
    if plan.against is not None:
        yield from (f"  {line}" for line in _against(plan.against))


def _against(found: ExpertDistance) -> Iterator[str]:
    yield "against:"
    yield f"  expert: {quote(found.expert)}"
    yield f"  cost_ns: {found.cost_ns}"
    for name in ("compute_s", "communication_s", "optimizer_s"):
        yield f"  {name}: {number(getattr(found, name))}"
    yield f"  peak_bytes: {found.peak_bytes}"
    for title, each in (("parts", found.parts), ("tensors", found.tensors)):
        yield from (f"  {line}" for line in _section(title, [f"- {_difference(one)}" for one in each], empty="[]"))


def _difference(each: PartDifference | TensorDifference) -> str:
    fields = ", ".join(
        f"{name}: {quote(value) if isinstance(value, str) else number(value)}" for name, value in vars(each).items()
    )
    return f"{{{fields}}}"


def _memory(memory: MemoryOutcome) -> Iterator[str]:
    yield "memory:"
    yield f"  optimizer: {quote(memory.optimizer)}"
    if memory.budget_bytes is not None:
        yield f"  budget_bytes: {memory.budget_bytes}"
    if memory.allocator_margin:
        yield f"  allocator_margin: {number(memory.allocator_margin)}"
    if memory.soft_ms_per_gib is not None:
        yield f"  soft_ms_per_gib: {number(memory.soft_ms_per_gib)}"
    static = ("parameters", "gradients", "optimizer", "buffers", "inputs")
    sizes = (getattr(memory, f"{name.removesuffix('s')}_bytes") for name in static)
    yield f"  static_bytes: {{{', '.join(f'{name}: {size}' for name, size in zip(static, sizes))}}}"
    yield f"  peak: {_point(memory.peak)}"
    yield from (f"  {line}" for line in _section("tenants", [f"- {_tenant(t)}" for t in memory.tenants], empty="[]"))
    yield f"  other_bytes: {memory.other_bytes}"
    yield from (f"  {line}" for line in _section("timeline", list(_timeline(memory.timeline)), empty="[]"))
    if memory.saved:
        yield from (f"  {line}" for line in _section("saved", [f"- {_saved(each)}" for each in memory.saved]))
    if memory.kinds:
        yield from (f"  {line}" for line in _section("kinds", [_kind(each) for each in memory.kinds]))


def _timeline(points: Iterable[MemoryPoint]) -> Iterator[str]:
    """Points of one phase that follow each other, several on a line, none of which has an operator twice."""
    lines: list[tuple[str, dict[str, int]]] = []
    for point in points:
        phase, line = lines[-1] if lines else ("", {})
        if phase != point.phase or len(line) == POINTS_PER_LINE or point.operator in line:
            lines.append((point.phase, {}))
        lines[-1][1][point.operator] = point.size_bytes
    for phase, line in lines:
        yield f"- {phase}: {{{', '.join(f'{quote_flow_key(name)}: {size}' for name, size in line.items())}}}"


def _point(point: MemoryPoint) -> str:
    return f"{{phase: {point.phase}, operator: {quote(point.operator)}, bytes: {point.size_bytes}}}"


def _tenant(tenant: MemoryTenant) -> str:
    name, size = quote(tenant.name), tenant.size_bytes
    return f"{{name: {name}, kind: {tenant.kind}, count: {tenant.count}, bytes: {size}}}"


def _kind(each: MemoryKind) -> str:
    """The sizes of a kind; where they are the same at every point, once."""
    sizes = each.size_bytes if len(set(each.size_bytes)) > 1 else each.size_bytes[:1]
    return f"{each.kind}: [{', '.join(map(str, sizes))}]"


def _saved(each: MemorySaved) -> str:
    return f"{{operator: {quote(each.operator)}, bytes: {each.size_bytes}}}"


def _section(title: str, lines: list[str], empty: str = "{}") -> Iterator[str]:
    yield f"{title}:" if lines else f"{title}: {empty}"
    yield from (f"  {line}" for line in lines)


def _by_phase(title: str, lines: Iterable[list[str]], empty: str = "{}") -> Iterator[str]:
    yield f"{title}:"
    for phase, section in zip(PHASES, lines):
        yield from (f"  {line}" for line in _section(phase, section, empty))


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


def _follower_line(group: list[Line[OperatorEntry]], mesh: Mesh, repeats: Repeats) -> str:
    module, _ = split_role(group[0].pattern)
    fields = [
        f"module: {quote(format_pattern(module, repeats))}",
        f"roles: [{', '.join(quote(split_role(line.pattern)[1]) for line in group)}]",
        f'strategy: "{format_strategy(group[0].value, mesh)}"',
        *_count(module.count * len(group)),
    ]
    return f"- {{{', '.join(fields)}}}"


def _block(block: Block) -> Iterator[str]:
    for part in block:
        if isinstance(part, Loop):
            yield f"- {quote_key(format_loop(part))}:"
            yield from (f"  {line}" for line in _block(part.body))
        else:
            roles = ", ".join(f"{quote_flow_key(role)}: {format_ns(ns)}" for role, ns in part.roles)
            yield f"- {quote_key(part.module)}: {{{roles}}}"


def _redistribution_line(line: Line[Redistribution], mesh: Mesh, repeats: Repeats) -> str:
    entry = line.value
    pattern = format_pattern(line.pattern, repeats)
    quote_key(pattern)  # the same limit on its length as where it is a key
    fields = [
        f"tensor: {quote(pattern)}",
        f"phase: {entry.phase}",
        f'path: "{format_path(entry.path, mesh)}"',
        f"collectives: [{', '.join(quote(format_collective(c)) for c in entry.collectives)}]",
        *_consumers(line),
        *(["kept: true"] if entry.kept else []),
        *([f"shared: {entry.shared}"] if entry.shared and not (entry.kept and len(entry.own) == 1) else []),
        *_count(line.pattern.count),
    ]
    return f"- {{{', '.join(fields)}}}"


def _consumers(line: Line[Redistribution]) -> list[str]:
    texts = written_for(line.pattern, line.value.consumers)
    return [f"for: [{', '.join(map(quote, texts))}]"] if texts else []


def _count(count: int) -> list[str]:
    return [f"count: {count}"] if count > 1 else []


def _totals(plan: ShardingPlan) -> Iterator[str]:
    yield "# Entries after unfolding. This line ends the file: a file without it was cut short."
    sections = ("parameters", "buffers", "inputs", "outputs", "operators", "redistributions")
    yield f"totals: {{{', '.join(f'{section}: {len(getattr(plan, section))}' for section in sections)}}}"
