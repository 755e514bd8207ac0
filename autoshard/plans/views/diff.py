"""What changed between two plans, as a value: numbers, placements by layer pattern, collectives, and words for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...layout import format_layout
from ...mesh import TOGETHER, Mesh
from ..plan import OperatorEntry, Redistribution, ShardingPlan
from ..text.layout_preserving import preserves_layout
from ..text.name_patterns import Line, Repeats, count_repeats, fold, format_pattern
from ..text.notation import format_path, format_strategy
from ..units import format_bytes, format_seconds
from .diff_words import again_words, parallelism_words, parameter_words
from .redistribution_reasons import what_runs
from .summary import PlanSummary, summarize

ABSENT = "-"
"""Stands for the layout of a tensor or operator that one of the plans does not have."""


@dataclass(frozen=True)
class Fact:
    """A head line of the two plans that differs: the model, the mesh or the objective, as it was and as it is."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Number:
    """A predicted quantity, in seconds or bytes, of one rank; None where a plan does not know it."""

    name: str
    unit: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Change:
    """Tensors or operators that go from one layout (or strategy) to another: their patterns, and how many they are."""

    section: str
    before: str
    after: str
    patterns: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class CollectiveChange:
    """Collectives of one kind on one axis in one phase, of one rank in one step."""

    phase: str
    kind: str
    axis: str
    before_count: int
    after_count: int
    before_bytes: int
    after_bytes: int
    before_s: float
    after_s: float


@dataclass(frozen=True)
class Move:
    """Redistributions that only one of the plans has; ``predicted_s`` and ``count`` are of all of them together."""

    change: str
    pattern: str
    phase: str
    path: str
    collectives: str
    count: int
    predicted_s: float


@dataclass(frozen=True)
class PlanDiff:
    """Everything that differs, but for how far the plans are from experts', which is no part of what they do. ``words``
    says it in sentences; ``other`` names parts that differ and are not listed.
    """

    same: bool
    words: tuple[str, ...]
    facts: tuple[Fact, ...]
    numbers: tuple[Number, ...]
    placements: tuple[Change, ...]
    operators: tuple[Change, ...]
    collectives: tuple[CollectiveChange, ...]
    moves: tuple[Move, ...]
    other: tuple[str, ...]


def diff_plans(old: ShardingPlan, new: ShardingPlan) -> PlanDiff:
    """Compares two plans, tensor by tensor and operator by operator, by name."""
    repeats = count_repeats(_names(old, new))
    before, after = summarize(old), summarize(new)
    facts = tuple(_facts(old, new))
    placements = tuple(_placements(old, new, repeats))
    operators = tuple(_operators(old, new, repeats))
    collectives = tuple(_collectives(before, after, (*new.mesh.axes, *old.mesh.axes)))
    moves = tuple(_moves(old, new, repeats))
    return PlanDiff(
        same=replace(old, against=None) == replace(new, against=None) and old.mesh.order == new.mesh.order,
        words=(*parallelism_words(old, new), *parameter_words(old, new, repeats), *again_words(before, after)),
        facts=facts,
        numbers=tuple(_numbers(before, after)),
        placements=placements,
        operators=operators,
        collectives=collectives,
        moves=moves,
        other=tuple(_other(old, new, operators, moves)),
    )


def diff_json(diff: PlanDiff) -> dict[str, Any]:
    """The difference as JSON-ready values. Later versions add keys and change none."""
    return {"autoshard_diff": 1, **asdict(diff)}


def _names(*plans: ShardingPlan) -> Iterator[str]:
    for plan in plans:
        yield from (entry.name for entry in (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs))
        yield from (entry.name for entry in plan.operators)
        yield from (entry.tensor for entry in plan.redistributions)


def _facts(old: ShardingPlan, new: ShardingPlan) -> Iterator[Fact]:
    def memory(plan: ShardingPlan, field: str) -> str:
        value = getattr(plan.memory, field) if plan.memory else None
        return ABSENT if value is None else format_bytes(value) if isinstance(value, int) else str(value)

    pairs = [
        ("model", old.model, new.model),
        ("graph of the model", old.fingerprint, new.fingerprint),
        ("mesh", str(old.mesh), str(new.mesh)),
        ("order of ranks", _order(old), _order(new)),
        ("hardware", old.hardware, new.hardware),
        ("hardware profile", old.hardware_fingerprint, new.hardware_fingerprint),
        ("network", _network(old), _network(new)),
        ("arithmetic at the peak", *_times_apart(old.at_peak_s, new.at_peak_s)),
        ("contention", f"{old.contention:g}", f"{new.contention:g}"),
        ("objective", old.objective, new.objective),
        ("micro-batches", str(old.micro_batches), str(new.micro_batches)),
        ("dim of the batch", str(old.batch_dim), str(new.batch_dim)),
        ("parameters computed as", old.precision.param_dtype or ABSENT, new.precision.param_dtype or ABSENT),
        ("gradients reduced as", old.precision.reduce_dtype or ABSENT, new.precision.reduce_dtype or ABSENT),
        ("bucket", format_bytes(old.bucket_bytes), format_bytes(new.bucket_bytes)),
        ("parameters are gathered", _when_gathered(old), _when_gathered(new)),
        ("pins", "; ".join(old.pins) or ABSENT, "; ".join(new.pins) or ABSENT),
        ("status", old.solver.verdict, new.solver.verdict),
        ("memory budget", memory(old, "budget_bytes"), memory(new, "budget_bytes")),
        ("allocator margin", memory(old, "allocator_margin"), memory(new, "allocator_margin")),
        ("optimizer", memory(old, "optimizer"), memory(new, "optimizer")),
    ]
    other_pins = {"pins"} if old.pins != new.pins else set[str]()  # pins of different plans may read the same
    yield from (Fact(*pair) for pair in pairs if pair[1] != pair[2] or pair[0] in other_pins)


def _order(plan: ShardingPlan) -> str:
    return ", ".join(map(str, plan.mesh.order)) or "the last axis fastest"


def _network(plan: ShardingPlan) -> str:
    return "; ".join(f"{axis} {words}" for axis, words in zip(plan.mesh.axes, plan.network)) or ABSENT


def _times_apart(*times_s: float | None) -> list[str]:
    """Times in four digits, or in all where four do not tell them apart."""
    texts = [ABSENT if time_s is None else format_seconds(time_s) for time_s in times_s]
    if len(set(texts)) == len(set(times_s)):
        return texts
    return [ABSENT if time_s is None else f"{time_s!r} s" for time_s in times_s]


def _when_gathered(plan: ShardingPlan) -> str:
    return "ahead" if plan.gathers_ahead else "where they are read"


def _numbers(before: PlanSummary, after: PlanSummary) -> Iterator[Number]:
    yield Number("predicted step", "s", before.step_s, after.step_s)
    if min(before.contention, after.contention) < 1:
        yield Number("predicted step as its schedule hides", "s", before.overlapped_s, after.overlapped_s)
    yield Number("computation", "s", before.compute_s, after.compute_s)
    yield Number("communication", "s", before.communication_s, after.communication_s)
    if (before.optimizer_s, after.optimizer_s) != (None, None):
        yield Number("optimizer step", "s", before.optimizer_s, after.optimizer_s)
    yield Number("parameters of one rank", "bytes", before.parameter_bytes_per_rank, after.parameter_bytes_per_rank)
    experts = [summary.against.step_s if summary.against else None for summary in (before, after)]
    if None not in experts:
        yield Number("best plan of experts", "s", *experts)
    peaks = [summary.memory.peak.size_bytes if summary.memory else None for summary in (before, after)]
    if peaks != [None, None]:
        yield Number("memory of one rank at its peak", "bytes", *peaks)


def _placements(old: ShardingPlan, new: ShardingPlan, repeats: Repeats) -> Iterator[Change]:
    for section in ("parameters", "buffers", "inputs", "outputs"):
        before, after = (
            {entry.name: format_layout(entry.layout, plan.mesh) for entry in getattr(plan, section)}
            for plan in (old, new)
        )
        yield from _changes(section, before, after, repeats)


def _operators(old: ShardingPlan, new: ShardingPlan, repeats: Repeats) -> Iterator[Change]:
    """Operators whose strategy changed; those that follow their first input in both plans are left out."""
    entries = [{(entry.phase, entry.name): entry for entry in plan.operators} for plan in (old, new)]
    for phase in ("forward", "backward"):
        before, after = (
            {
                name: _strategy(entry, plan.mesh)
                for (of, name), entry in these.items()
                if of == phase and not all(preserves_layout(e[of, name]) for e in entries if (of, name) in e)
            }
            for these, plan in zip(entries, (old, new))
        )
        yield from _changes(phase, before, after, repeats)


def _strategy(entry: OperatorEntry, mesh: Mesh) -> str:
    return format_strategy(entry, mesh)


def _changes(section: str, before: Mapping[str, str], after: Mapping[str, str], repeats: Repeats) -> Iterator[Change]:
    """What is different under a name; names that changed in the same way are one entry, at the place of the first."""
    names = dict.fromkeys((*before, *after))
    pairs = [(name, (before.get(name, ABSENT), after.get(name, ABSENT))) for name in names]
    groups: dict[tuple[str, str], list[Line[tuple[str, str]]]] = defaultdict(list)
    for line in fold([pair for pair in pairs if pair[1][0] != pair[1][1]]):
        groups[line.value].append(line)
    for (was, now), lines in groups.items():
        patterns = tuple(format_pattern(line.pattern, repeats) for line in lines)
        yield Change(section, was, now, patterns, sum(line.pattern.count for line in lines))


def _collectives(before: PlanSummary, after: PlanSummary, axes: Sequence[str]) -> Iterator[CollectiveChange]:
    old, new = ({(t.phase, t.kind, t.axis): t for t in summary.collectives} for summary in (before, after))

    def place(key: tuple[str, str, str]) -> tuple[bool, str, list[int]]:
        return key[0] != "forward", key[1], [axes.index(axis) for axis in key[2].split(TOGETHER)]

    for key in sorted(old.keys() | new.keys(), key=place):
        was, now = old.get(key), new.get(key)
        if was != now:
            yield CollectiveChange(
                *key,
                was.count if was else 0,
                now.count if now else 0,
                was.size_bytes if was else 0,
                now.size_bytes if now else 0,
                was.predicted_s if was else 0.0,
                now.predicted_s if now else 0.0,
            )


def _moves(old: ShardingPlan, new: ShardingPlan, repeats: Repeats) -> list[Move]:
    """Redistributions added and removed, the dearest first."""
    was, now = (
        {
            (entry.tensor, entry.phase, format_path(entry.path, plan.mesh), _steps(entry)): entry.predicted_s
            for entry in plan.redistributions
        }
        for plan in (old, new)
    )
    moves = []
    for change, these, others in (("removed", was, now), ("added", now, was)):
        lines = fold([(key[0], (*key[1:], time)) for key, time in these.items() if key not in others])
        for line in lines:
            phase, path, steps, time = line.value
            count = line.pattern.count
            moves.append(Move(change, format_pattern(line.pattern, repeats), phase, path, steps, count, time * count))
    return sorted(moves, key=lambda move: -move.predicted_s)


def _steps(entry: Redistribution) -> str:
    return what_runs(entry, ", ".join(f"{c.kind} {c.axis} {c.size_bytes}" for c in entry.collectives))


def _tensors(plan: ShardingPlan) -> list[list[tuple[str, tuple[int, ...], str]]]:
    sections = plan.parameters, plan.buffers, plan.inputs, plan.outputs
    return [[(entry.name, entry.shape, entry.dtype) for entry in entries] for entries in sections]


def _other(
    old: ShardingPlan, new: ShardingPlan, operators: tuple[Change, ...], moves: tuple[Move, ...]
) -> Iterator[str]:
    """The parts of the plans that differ although no list above shows it: two plans that differ never look the same."""
    if old.call != new.call:
        yield "how the model is called"
    if _tensors(old) != _tensors(new):
        yield "the tensors' shapes and dtypes, or their order"
    if old.solver.gap != new.solver.gap:
        yield f"the gap that is not closed ({old.solver.gap:.3%} -> {new.solver.gap:.3%})"
    if old.operators != new.operators and not operators:
        yield "operators that follow their input"
    if old.redistributions != new.redistributions and not moves:
        yield "redistributions: their times, or who wants them"
    if old.operators == new.operators and old.execution != new.execution:
        yield "the order or the times of the operators"
    if old.memory != new.memory:
        yield "the course of memory"
