"""The course of a rank's memory over a step, by kind: what is held whatever runs at the bottom, the rest on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..memory_outcome import MemoryOutcome, TenantKind, allowed_bytes
from ..plan import ShardingPlan

WIDTH, HEIGHT = 1000, 260
KINDS: Mapping[TenantKind, tuple[str, str]] = {
    "parameter": ("parameters", "parameter"),
    "optimizer": ("state of the optimizer", "optimizer"),
    "buffer": ("buffers", "buffer"),
    "input": ("inputs", "input"),
    "gradient": ("gradients", "gradient"),
    "activation": ("activations", "activation"),
    "kept copy": ("kept copies, made by the forward and read by the backward", "kept"),
    "temporary": ("copies on their way, and the work of the optimizer", "copy"),
    "output": ("results", "output"),
}
"""The name and the class of each kind, from the bottom up: first what is held whatever runs."""


@dataclass(frozen=True)
class Band:
    """Memory of one kind: its name, the class that colours it, its bytes at the peak, and its place in the chart."""

    name: str
    tone: str
    peak_bytes: int
    points: str


@dataclass(frozen=True)
class MemoryChart:
    """A chart of ``top_bytes``, its bands from the bottom up, and a bar to point at for each moment.

    ``ticks`` are round numbers of bytes with their heights. ``budget_at`` is the height at which bytes in use are as
    many as the budget allows; None where that is above it.
    """

    bands: tuple[Band, ...]
    bars: tuple[tuple[float, float, float, str, int], ...]
    phases: tuple[tuple[float, str], ...]
    ticks: tuple[tuple[float, int], ...]
    peak_at: tuple[float, float]
    budget_at: float | None
    top_bytes: int


def top_bytes(plan: ShardingPlan) -> int:
    """The most that a chart of a plan has to show: its peak, or what its budget allows if that is not far above it."""
    memory = plan.memory
    if memory is None:
        return 1
    peak, allowed = memory.peak.size_bytes, _allowed(memory) or 0
    return max(peak, allowed if allowed <= 2 * peak else 0, 1)


def memory_chart(plan: ShardingPlan, top: int | None = None) -> MemoryChart | None:
    """The chart of a plan's memory over one step, as high as ``top`` bytes; None where the plan does not know it."""
    memory = plan.memory
    if memory is None or not memory.timeline:
        return None
    top, allowed = top or top_bytes(plan), _allowed(memory)
    wide = WIDTH / len(memory.timeline)

    def y(size_bytes: float) -> float:
        return round(HEIGHT * (1 - size_bytes / top), 2)

    sizes = [point.size_bytes for point in memory.timeline]
    peak = sizes.index(memory.peak.size_bytes)
    bands, below = [], [0] * len(sizes)
    for name, tone, course in _courses(memory):
        above = [base + size for base, size in zip(below, course)]
        points = " ".join(f"{x:g},{at:g}" for x, at in (*_steps(above, wide, y), *reversed(_steps(below, wide, y))))
        bands.append(Band(name, tone, course[peak], points))
        below = above
    bars = tuple(
        (round(i * wide, 2), y(point.size_bytes), round(wide, 2), f"{point.phase} {point.operator}", point.size_bytes)
        for i, point in enumerate(memory.timeline)
    )
    starts: dict[str, float] = {}
    for (x, *_), point in zip(bars, memory.timeline):
        starts.setdefault(point.phase, x)
    return MemoryChart(
        bands=tuple(bands),
        bars=bars,
        phases=tuple((x, phase) for phase, x in starts.items()),
        ticks=tuple((y(size), size) for size in _round_sizes(top)),
        peak_at=(round((peak + 0.5) * wide, 2), y(memory.peak.size_bytes)),
        budget_at=None if allowed is None or allowed > top else y(allowed),
        top_bytes=top,
    )


def _round_sizes(top: int) -> range:
    """Up to five sizes below ``top``, multiples of 1, 2 or 5 of a unit times a power of ten.

    >>> [size >> 30 for size in _round_sizes(24 << 30)]
    [5, 10, 15, 20]
    """
    unit = 1024 ** (max(top.bit_length() - 1, 0) // 10)
    tens = 10 ** (len(str(top // unit)) - 1)
    steps = [max(1, unit * tens * times // 10) for times in (1, 2, 5, 10, 20)]
    step = next(each for each in steps if top <= 5 * each or each == steps[-1])
    return range(step, top, step)


def _allowed(memory: MemoryOutcome) -> int | None:
    return None if memory.budget_bytes is None else allowed_bytes(memory.budget_bytes, memory.allocator_margin)


def _courses(memory: MemoryOutcome) -> Iterator[tuple[str, str, Sequence[int]]]:
    """The name, the class and the bytes at each moment of every kind, from the bottom up; together what is in use."""
    known = {each.kind: each.size_bytes for each in memory.kinds}
    if known:
        for kind, (name, tone) in KINDS.items():
            if kind in known:
                yield name, tone, known[kind]
        return
    left = [point.size_bytes for point in memory.timeline]
    held: tuple[tuple[TenantKind, int], ...] = (
        ("parameter", memory.parameter_bytes),
        ("optimizer", memory.optimizer_bytes),
        ("buffer", memory.buffer_bytes),
        ("input", memory.input_bytes),
    )
    for kind, size in held:
        course = [min(size, rest) for rest in left]
        left = [rest - taken for rest, taken in zip(left, course)]
        if any(course):
            yield *KINDS[kind], course
    if any(left):
        yield "gradients, activations and copies, which the plan does not tell apart", "activation", left


def _steps(heights: Sequence[int], wide: float, y: Callable[[float], float]) -> list[tuple[float, float]]:
    return [(round(x, 2), y(size)) for i, size in enumerate(heights) for x in (i * wide, (i + 1) * wide)]
