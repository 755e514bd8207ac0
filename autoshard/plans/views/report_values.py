"""The values that the report of a plan shows: parts of the step, a map of the layers, the course of memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, groupby

from ...layout import Layout
from ...mesh import Mesh
from ...micro_batches import operator_runs
from ..memory_outcome import allowed_bytes
from ..plan import ShardingPlan
from ..text.folded_plan import FoldedPlan
from ..text.layout_preserving import preserves_layout
from ..text.name_patterns import Pattern, format_pattern, prefix_of


@dataclass(frozen=True)
class Part:
    """A part of the predicted step: its name, seconds, and the class that colours it."""

    name: str
    seconds: float
    colour: str


def cost_split(plan: ShardingPlan) -> list[Part]:
    """Computation by phase where the plan knows it, communication by mesh axis, local copies, the optimizer's step."""
    if plan.execution:
        parts = [
            Part(f"compute, {phase}", _compute_s(plan, phase), tone)
            for phase, tone in (("forward", "compute"), ("backward", "compute2"))
        ]
    else:
        parts = [Part("compute", plan.compute_s, "compute")]
    for i, axis in enumerate(plan.links):
        seconds = math.fsum(c.predicted_s for _, c in plan.collectives() if c.axis == axis)
        parts.append(Part(f"communication over {axis}", seconds, f"axis{i % 6}"))
    copies = plan.communication_s - math.fsum(c.predicted_s for _, c in plan.collectives())
    if copies > 1e-9:
        parts.append(Part("local copies", copies, "copies"))
    if plan.optimizer_s:
        parts.append(Part("optimizer", plan.optimizer_s, "optimizer"))
    return parts


def _compute_s(plan: ShardingPlan, phase: str) -> float:
    """Seconds of the operators of a phase in a step."""
    runs = ((operator_runs(e.name, plan.micro_batches), e.predicted_ns) for e in plan.execution if e.phase == phase)
    return math.fsum(times * took for times, took in runs) / 1e9


def layout_label(layout: Layout, mesh: Mesh) -> str:
    """A layout in a few characters: ``dp:S(0)`` for ``dp:S(0) tp:R``, and ``whole`` where every axis replicates."""
    cut = [f"{axis}:{placement}" for axis, placement in zip(mesh.axes, layout) if placement.kind != "R"]
    return " ".join(cut) or "whole"


# The map of layers and tensors ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MapRow:
    """A tensor of every layer of a stack, and its layout's label in each group of layers ('' where it has none)."""

    name: str
    section: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class LayerMap:
    """The tensors of one stack of layers; ``columns`` are groups of neighbouring layers that are alike."""

    stack: str
    columns: tuple[str, ...]
    rows: tuple[MapRow, ...]

    @property
    def sections(self) -> list[tuple[str, list[MapRow]]]:
        """The rows of each section, in the order of the sections."""
        return [(section, list(rows)) for section, rows in groupby(self.rows, key=lambda row: row.section)]


def layer_maps(plan: ShardingPlan, folded: FoldedPlan) -> list[LayerMap]:
    """A map for each stack of layers, and one for the tensors outside of them, which comes last."""
    stacks: dict[str, dict[tuple[str, str], dict[int, str]]] = defaultdict(lambda: defaultdict(dict))
    outside: list[MapRow] = []
    for section, lines in _mapped(folded):
        for pattern, layout in lines:
            label = layout_label(layout, plan.mesh)
            if not pattern.choices:
                outside.append(MapRow(format_pattern(pattern, folded.repeats), section, (label,)))
                continue
            stack, name = _in_stack(pattern, folded)
            for index in chain(*pattern.choices[0]):
                stacks[stack][section, name][index] = label
    maps = [_layer_map(stack, rows) for stack, rows in stacks.items()]
    return [*maps, LayerMap("", ("",), tuple(outside))] if outside else maps


def _mapped(folded: FoldedPlan) -> list[tuple[str, list[tuple[Pattern, Layout]]]]:
    """Parameters, and the first results of the operators that decide something."""
    sections = [("parameters", [(line.pattern, line.value.layout) for line in folded.parameters])]
    for phase, lines in (("forward", folded.forward), ("backward", folded.backward)):
        decide = [line for line in lines if not preserves_layout(line.value) and line.value.outputs]
        results = [(line.pattern, layout) for line in decide if (layout := line.value.outputs[0]) is not None]
        sections.append((f"results of deciding operators, {phase}", results))
    return sections


def _in_stack(pattern: Pattern, folded: FoldedPlan) -> tuple[str, str]:
    """The path of the stack that a pattern's first index belongs to, and the name of the tensor in a layer."""
    at = pattern.components.index(None)
    written = format_pattern(pattern, folded.repeats).partition("/")[0].split(".")
    return prefix_of(pattern.components[:at]), ".".join(written[at + 1 :]) + pattern.role


def _layer_map(stack: str, rows: dict[tuple[str, str], dict[int, str]]) -> LayerMap:
    indices = sorted({index for labels in rows.values() for index in labels})
    alike = [
        list(group)
        for _, group in groupby(indices, key=lambda index: [labels.get(index, "") for labels in rows.values()])
    ]
    columns = tuple(f"{g[0]}-{g[-1]} (x{len(g)})" if len(g) > 1 else str(g[0]) for g in alike)
    return LayerMap(
        stack,
        columns,
        tuple(
            MapRow(name, section, tuple(labels.get(group[0], "") for group in alike))
            for (section, name), labels in rows.items()
        ),
    )


def palette(maps: Iterable[LayerMap]) -> dict[str, str]:
    """The CSS class of each layout's label: one of eight tones, given by how often a label is seen; after that the same
    tones hatched. ``whole`` has a class of its own.
    """
    seen: dict[str, int] = defaultdict(int)
    for row in (row for layers in maps for row in layers.rows):
        for label in row.labels:
            seen[label] += 1
    ordered = sorted((label for label in seen if label not in ("", "whole")), key=lambda label: (-seen[label], label))
    colours = {label: f"tone{i % 8}" + (" hatched" if i >= 8 else "") for i, label in enumerate(ordered)}
    return {"whole": "whole", **colours}


# The course of memory -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryChart:
    """The course of memory as a chart of ``width`` x ``height``: its outline, and a bar to point at for each moment.

    All of it is bytes in use; ``budget_at`` is where these are as many as the budget allows.
    """

    width: int
    height: int
    outline: str
    bars: tuple[tuple[float, float, float, str, int], ...]
    backward_at: float | None
    budget_at: float | None
    top_bytes: int


def memory_chart(plan: ShardingPlan, width: int = 900, height: int = 220) -> MemoryChart | None:
    """The chart of a plan's memory over one step; None where the plan does not know it."""
    memory = plan.memory
    if memory is None or not memory.timeline:
        return None
    allowed = None if memory.budget_bytes is None else allowed_bytes(memory.budget_bytes, memory.allocator_margin)
    top = max(memory.peak.size_bytes, allowed or 0, 1)
    step = width / len(memory.timeline)

    def y(size_bytes: int) -> float:
        return round(height * (1 - size_bytes / top), 2)

    bars = tuple(
        (round(i * step, 2), y(point.size_bytes), round(step, 2), f"{point.phase} {point.operator}", point.size_bytes)
        for i, point in enumerate(memory.timeline)
    )
    outline = " ".join(f"{x},{at} {round(x + wide, 2)},{at}" for x, at, wide, _, _ in bars)
    backward = next((x for (x, *_), point in zip(bars, memory.timeline) if point.phase != "forward"), None)
    budget = None if allowed is None else y(allowed)
    return MemoryChart(width, height, f"0,{height} {outline} {width},{height}", bars, backward, budget, top)
