"""A step drawn as lanes: computation, and a lane for each link with what hides behind computation and what does not.

The whole step is drawn as the share of each moment that a lane is busy, layer by layer too fine to be told apart; one
layer of each phase is drawn operator by operator. Lengths are those of :mod:`autoshard.plans.simulation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ..exposure import Exposure
from ..plan import PHASES, Execution, Phase, Redistribution, ShardingPlan
from ..schedule import Bucket, layer_of
from ..simulation import COMPUTE, Span
from ..units import format_bytes, format_seconds

WIDTH = 1000
LANE, GAP = 34, 8
PARTS = 250
"""Into so many equal parts the step is cut; the chart shows how busy each lane is in each."""
_CHARACTER, _WIDE_CHARACTER = 7.4, 12.0
"""About the width of one in the chart, and of an m or a w."""


@dataclass(frozen=True)
class Area:
    """How busy a lane is over the step, as a polygon: ``name`` says with what, ``tone`` is the class of its colour."""

    name: str
    tone: str
    points: str


@dataclass(frozen=True)
class Bar:
    """An operator or a collective: a rectangle with what it says when pointed at, and a label where there is room."""

    x: float
    width: float
    tone: str
    title: str
    label: str


@dataclass(frozen=True)
class Lane:
    """A lane at height ``y`` with its name and what is in it."""

    name: str
    y: int
    areas: tuple[Area, ...] = ()
    bars: tuple[Bar, ...] = ()


@dataclass(frozen=True)
class LaneChart:
    """Lanes over ``took_ns`` of a step: that of a layer and phase, or (both empty) all of it. ``marks`` has places with
    their names.
    """

    name: str
    phase: str
    lanes: tuple[Lane, ...]
    marks: tuple[tuple[float, str], ...]
    took_ns: int

    @property
    def height(self) -> int:
        """The height of all lanes."""
        return len(self.lanes) * (LANE + GAP)


def step_chart(exposure: Exposure, longest_ns: int | None = None) -> LaneChart:
    """The whole step; its width is that of ``longest_ns``, so that charts of several plans have one scale."""
    step_ns = exposure.simulation.step_ns
    part_ns = max(longest_ns or step_ns, 1) / PARTS
    spans = exposure.simulation.spans
    lanes = []
    for k, name in enumerate(("", *exposure.plan.links)):
        busy: dict[tuple[str, str], list[float]] = {}
        for span in spans:
            if span.lane == name and span.took_ns:
                for part, series, took_ns in _pieces(span, part_ns, exposure):
                    busy.setdefault(series, [0.0] * PARTS)[part] += took_ns / part_ns
        lanes.append(Lane(_lane_name(name), k * (LANE + GAP), areas=tuple(_areas(busy))))
    return LaneChart("", "", tuple(lanes), tuple(_marks(spans, part_ns)), step_ns)


def layer_charts(exposure: Exposure) -> list[LaneChart]:
    """The layer in the middle of the forward and that in the middle of the backward, operator by operator."""
    charts = []
    for phase in PHASES:
        window = _middle_layer(exposure.plan, exposure.simulation.spans, phase)
        if window is not None:
            charts.append(_detail(exposure, *window))
    return charts


def _lane_name(lane: str) -> str:
    return f"link {lane}" if lane else "computation"


def _pieces(span: Span, part_ns: float, exposure: Exposure) -> Iterator[tuple[int, tuple[str, str], float]]:
    """A span cut at the borders of the parts: which part, what it is there, and for how long."""
    first, last = int(span.start_ns / part_ns), min(PARTS - 1, int(span.end_ns / part_ns))
    for part in range(first, last + 1):
        start, end = max(span.start_ns, part * part_ns), min(span.end_ns, (part + 1) * part_ns)
        if end <= start:
            continue
        if span.lane == COMPUTE:
            yield part, (span.phase, _tone(span)), end - start
            continue
        hidden = exposure.computed.between(start, end)
        tone = _link_tone(exposure.plan, span.lane)
        yield part, ("exposed", tone), end - start - hidden
        yield part, ("hidden", f"{tone} hides"), hidden


def _tone(span: Span) -> str:
    return {"forward": "compute", "backward": "compute2", "optimizer": "optimizer"}[span.phase]


def _link_tone(plan: ShardingPlan, link: str) -> str:
    return f"axis{plan.links.index(link) % 6}"


def _areas(busy: dict[tuple[str, str], list[float]]) -> Iterator[Area]:
    """One on the other, those that are exposed below."""
    below = [0.0] * PARTS
    for name, tone in sorted(busy, key=lambda series: series[0]):
        above = [min(1.0, a + b) for a, b in zip(below, busy[name, tone])]
        if max(busy[name, tone]) > 0:
            yield Area(name, tone, _outline(below, above))
        below = above


def _outline(below: Sequence[float], above: Sequence[float]) -> str:
    """A polygon between two courses, both in steps."""
    there = _steps(above, range(PARTS))
    back = reversed(list(_steps(below, range(PARTS))))
    return " ".join(f"{x:g},{y:g}" for x, y in (*there, *back))


def _steps(heights: Sequence[float], parts: Iterable[int]) -> Iterator[tuple[float, float]]:
    wide = WIDTH / PARTS
    last = None
    for part in parts:
        y = round(LANE * (1 - heights[part]), 1)
        if y != last:
            if last is not None:
                yield part * wide, last
            yield part * wide, y
        last = y
    yield WIDTH, last or 0.0


def _marks(spans: Sequence[Span], part_ns: float) -> Iterator[tuple[float, str]]:
    """Where a phase begins, unless it is too near to the one before for its name to be read."""
    starts: dict[str, int] = {}
    for span in spans:
        starts.setdefault(span.phase, span.start_ns)
    shown = -100.0
    for phase, start in starts.items():
        x = round(start / part_ns * WIDTH / PARTS, 2)
        if x - shown > 60:
            yield x, phase
            shown = x


def _middle_layer(plan: ShardingPlan, spans: Sequence[Span], phase: Phase) -> tuple[str, Phase, int, int] | None:
    """The layer, and the stretch from the end of the operator before it to the end of its own last one."""
    run = [span for span in spans if span.phase == phase and isinstance(span.what, Execution)]
    layers = [layer_of(span.what.name) for span in run if isinstance(span.what, Execution)]
    # a layer computes in one stretch, but for operators that are computed again or read by other layers
    names = list(dict.fromkeys(filter(None, layers)))
    if not names:
        return None
    name = names[len(names) // 2]
    first = layers.index(name)
    last = next((k for k in range(first, len(run)) if layers[k] not in (name, "")), len(run)) - 1
    start, end = (run[first - 1].end_ns if first else 0), run[last].end_ns
    return (name, phase, start, end) if end > start else None


def _detail(exposure: Exposure, name: str, phase: Phase, start: int, end: int) -> LaneChart:
    scale = WIDTH / (end - start)
    lanes: list[Lane] = []
    for lane in ("", *exposure.plan.links):
        bars: list[Bar] = []
        for span in exposure.simulation.spans:
            if span.lane == lane and span.took_ns and span.start_ns < end and span.end_ns > start:
                bars += _bars(exposure, span, start, end, scale)
        if bars or not lane:
            lanes.append(Lane(_lane_name(lane), len(lanes) * (LANE + GAP), bars=tuple(bars)))
    return LaneChart(name, phase, tuple(lanes), (), end - start)


def _bars(exposure: Exposure, span: Span, start: int, end: int, scale: float) -> Iterator[Bar]:
    """A span as one bar, or, where only some of it hides, as one for what does and one for what does not."""
    name, more = _said(span)
    tone, hidden = _tone(span), 0.0
    if span.lane != COMPUTE:
        tone, hidden = _link_tone(exposure.plan, span.lane), exposure.computed.between(span.start_ns, span.end_ns)
        more = f"{more}, {format_seconds(hidden / 1e9)} of it hidden" if hidden else more
    pieces = [(hidden, f"{tone} hides"), (span.took_ns - hidden, tone)]  # it sets out beside what runs
    edges = list(accumulate((took for took, _ in pieces), initial=float(span.start_ns)))
    title = f"{name}: {format_seconds(span.took_ns / 1e9)}{more}"
    for (took, colour), begins, ends in zip(pieces, edges, edges[1:]):
        left, right = max(begins, start), min(ends, end)
        if took and right > left:
            width = (right - left) * scale
            label = next((text for text in _short(name) if _wide(text) + 6 <= width), "")
            yield Bar(round((left - start) * scale, 2), round(width, 2), colour, title, label)


def _short(name: str) -> tuple[str, ...]:
    """What may stand for a name where there is little room, the longest first: ``w1/bwd.mm``, ``bwd.mm``, ``mm``."""
    path, _, role = name.rpartition("/")
    return f"{path.rpartition('.')[2]}/{role}".lstrip("/"), role, role.removeprefix("bwd.")


def _wide(text: str) -> float:
    return sum(_WIDE_CHARACTER if character in "mwMW" else _CHARACTER for character in text)


def _said(span: Span) -> tuple[str, str]:
    """What runs in a span: its name, and more."""
    what = span.what
    if isinstance(what, Execution):
        return what.name, ""
    if isinstance(what, Redistribution):
        each = what.collectives[span.step]
        return each.kind, f", {format_bytes(each.size_bytes)} of {what.tensor}"
    if isinstance(what, Bucket):
        travel = what.travels[span.step]
        others = f" and {len(what.members) - 1} more" if len(what.members) > 1 else ""
        return travel.kind, f", {format_bytes(travel.size_bytes)} of {what.members[0].tensor}{others}"
    return "optimizer", ""
