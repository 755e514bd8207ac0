"""What changed between two plans in sentences, such as *along dp: data parallel became fully sharded*."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from ..plan import ShardingPlan, TensorEntry
from ..text.name_patterns import Repeats, fold, format_pattern
from ..units import format_bytes, format_seconds
from .parallelism import SUMMED, Parallelism, ParameterParallelism, size_bytes
from .summary import AgainTotal, PlanSummary


def parallelism_words(old: ShardingPlan, new: ShardingPlan) -> Iterator[str]:
    """What changed along each axis that both plans have."""
    for axis in (axis for axis in new.mesh.axes if axis in old.mesh.axes):
        was, now = Parallelism(old).words(axis), Parallelism(new).words(axis)
        if was != now:
            yield f"{axis}: {was} -> {now}, by bytes of parameters"


def again_words(before: PlanSummary, after: PlanSummary) -> Iterator[str]:
    """For example ``computed again in the backward: 0 operators, 0 s -> 12 operators, 3.1 ms, 2.00 GiB not kept``."""
    if before.recomputed != after.recomputed:
        yield f"computed again in the backward: {_again(before)} -> {_again(after)}"


def _again(summary: PlanSummary) -> str:
    total = AgainTotal.together("all", summary.recomputed)
    saved = f", {format_bytes(total.saved_bytes)} not kept" if total.saved_bytes else ""
    return f"{total.count} operators, {format_seconds(total.predicted_s)}{saved}"


def parameter_words(old: ShardingPlan, new: ShardingPlan, repeats: Repeats) -> Iterator[str]:
    """A sentence for every way in which parameters changed along an axis."""
    parallelism = Parallelism(old), Parallelism(new)
    before = {entry.name: entry for entry in old.parameters}
    for axis in (axis for axis in new.mesh.axes if axis in old.mesh.axes):
        changed: dict[tuple[ParameterParallelism, ParameterParallelism], list[TensorEntry]] = defaultdict(list)
        for entry in new.parameters:
            if entry.name in before:
                pair = parallelism[0].of(before[entry.name], axis), parallelism[1].of(entry, axis)
                if pair[0] != pair[1]:
                    changed[pair].append(entry)
        for (was, now), entries in changed.items():
            yield f"{_subject(entries, repeats)}: {_said(was, now, axis)}"


def _subject(entries: Iterable[TensorEntry], repeats: Repeats) -> str:
    entries = list(entries)
    patterns = [format_pattern(line.pattern, repeats) for line in fold([(entry.name, None) for entry in entries])]
    named = ", ".join(patterns[:3]) + (f" and {len(patterns) - 3} more patterns" if patterns[3:] else "")
    size = format_bytes(sum(map(size_bytes, entries)))
    return f"{len(entries)} parameters ({size}: {named})" if len(entries) > 1 else named


def _said(was: ParameterParallelism, now: ParameterParallelism, axis: str) -> str:
    """``now cut over dp (dim 0): gathered before use, gradients reduce-scattered instead of all-reduced``."""
    said = {
        ("whole", "gathered"): f"now cut over {axis} (dim {now.dim}) and gathered before use",
        ("cut", "gathered"): f"now gathered over {axis} before use",
        ("whole", "cut"): f"now cut over {axis} (dim {now.dim}) and used cut",
        ("gathered", "cut"): f"no longer gathered over {axis}, but used cut",
        ("gathered", "whole"): f"now whole along {axis}, no longer gathered",
        ("cut", "whole"): f"now whole along {axis}",
    }.get((was.use, now.use), "")
    if was.use == now.use and was.dim != now.dim:
        said = f"cut over {axis} in dim {now.dim} instead of {was.dim}"
    gradients = ""
    if was.summed != now.summed:
        before, after = (SUMMED[style.summed] if style.summed else "" for style in (was, now))
        gradients = f"gradients {after} instead of {before}" if before and after else ""
        gradients = gradients or f"gradients {f'now {after}' if after else f'no longer {before}'} over {axis}"
    name = f" ({was.name} -> {now.name})" if was.name != now.name else ""
    return "; ".join(part for part in (said, gradients) if part) + name
