"""The one-line notations of a plan file: strategies, paths, collectives. Each parse is the inverse of its format.

strategy
    ``dp:S(0) tp:R, dp:R tp:S(1) -> dp:S(0) tp:S(1)``: the layout wanted of each tensor argument, an arrow, the layout
    of each result (``-`` for a result that is not a tensor); ``x4`` at the end counts the operators of a folded line.
path
    ``dp:S(0) tp:R => dp:R tp:R``: the layouts a redistribution goes through.
collective
    ``all_gather dp 262144 bytes 0.0125 ms``: kind, mesh axis (``dp+tp`` for one over both), bytes, predicted time.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from math import prod

from cost_models.collective_kinds import REDISTRIBUTION_KINDS

from ...layout import Layout, check_fits, format_layout, parse_layout
from ...layout import format_strategy as strategy_text
from ...mesh import Mesh
from ...redistribution import step_on
from ..dtypes import DTYPE_BYTES
from ..plan import Collective, CollectiveKind, OperatorEntry, Redistribution, TensorEntry

_STRATEGY = re.compile(r"(?P<inputs>[^>]*)->(?P<outputs>[^>]*?)(?: x(?P<count>[1-9]\d{0,8}))?", re.ASCII)
_COLLECTIVE = re.compile(
    r"(?P<kind>[a-z_]+) (?P<axis>\w+(?:\+\w+)*) (?P<bytes>\d{1,18}) bytes (?P<ms>\d[\d.]{0,400}(?:E[+-]?\d{1,3})?) ms",
    re.ASCII,
)
_KINDS: dict[str, CollectiveKind] = {kind: kind for kind in REDISTRIBUTION_KINDS}

MAX_SECONDS = 1e9
"""The longest predicted time (30 years), so that sums of times stay finite."""
MAX_ELEMENTS = 1 << 62
"""The most elements of one tensor; torch counts them in 64 bits too."""

Strategy = tuple[tuple[Layout, ...], tuple[Layout | None, ...]]


def format_strategy(entry: OperatorEntry, mesh: Mesh, count: int = 1) -> str:
    """The strategy of an operator, and the count of a folded line."""
    return strategy_text(entry.inputs, entry.outputs, mesh) + (f" x{count}" if count > 1 else "")


def parse_strategy(text: str, mesh: Mesh) -> tuple[Strategy, int]:
    """The layouts of the inputs and outputs, and the count.

    Raises:
        ValueError: the text is not ``INPUTS -> OUTPUTS``, or a layout in it cannot be read.
    """
    match = _STRATEGY.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"cannot read the strategy {text!r}; write input layouts, ->, output layouts, for example "
            "dp:S(0) tp:R, dp:R tp:S(1) -> dp:S(0) tp:S(1)"
        )
    inputs = tuple(_parse_layout(item, mesh) for item in _items(match["inputs"]))
    outputs = tuple(None if item == "-" else _parse_layout(item, mesh) for item in _items(match["outputs"]))
    return (inputs, outputs), int(match["count"] or 1)


def format_path(path: tuple[Layout, ...], mesh: Mesh) -> str:
    """The layouts of a redistribution."""
    return " => ".join(format_layout(layout, mesh) for layout in path)


def parse_path(text: str, mesh: Mesh) -> tuple[Layout, ...]:
    """Reads a path.

    Raises:
        ValueError: a layout in it cannot be read.
    """
    return tuple(_parse_layout(item.strip(), mesh) for item in text.split("=>"))


def format_collective(collective: Collective) -> str:
    """A collective; its time in milliseconds is the exact decimal of the float, moved by three digits."""
    return f"{collective.kind} {collective.axis} {collective.size_bytes} bytes {_format_ms(collective.predicted_s)} ms"


def parse_collective(text: str) -> Collective:
    """Reads a collective.

    Raises:
        ValueError: it cannot be read, or its kind is unknown.
    """
    match = _COLLECTIVE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"cannot read the collective {text!r}; write kind, axis, bytes and time, for example "
            "all_gather dp 262144 bytes 0.0125 ms"
        )
    if match["kind"] not in _KINDS:
        raise ValueError(f"unknown collective {match['kind']!r}; expected {', '.join(_KINDS)}")
    return Collective(_KINDS[match["kind"]], match["axis"], int(match["bytes"]), _parse_ms(match["ms"]))


def check_tensor(entry: TensorEntry, mesh: Mesh) -> None:
    """Checks that a tensor of a plan can exist.

    Raises:
        ValueError: the element type is unknown, no tensor has the shape, or the layout does not fit it.
    """
    if entry.dtype not in DTYPE_BYTES:
        raise ValueError(
            f"unknown dtype {entry.dtype!r}; expected torch's name of one, for example float32 or bfloat16"
        )
    if min(entry.shape, default=0) < 0 or prod(entry.shape) > MAX_ELEMENTS:
        raise ValueError(f"no tensor has the shape {list(entry.shape)}")
    check_fits(entry.layout, entry.shape, mesh)


def check_operator(entry: OperatorEntry, mesh: Mesh) -> None:
    """Checks that every layout of a strategy has one placement per mesh axis.

    Raises:
        ValueError: one has not.
    """
    for layout in (*entry.inputs, *entry.outputs):
        if layout is not None and len(layout) != mesh.ndim:
            raise ValueError(f"a layout on the mesh {mesh} needs {mesh.ndim} placements, got {len(layout)}")


def check_redistribution(entry: Redistribution, mesh: Mesh) -> None:
    """Checks that each step of the path is one that exists, and that the collectives are those of the steps.

    Raises:
        ValueError: it is not so.
    """
    if len(entry.path) < 2 or any(len(layout) != mesh.ndim for layout in entry.path):
        raise ValueError(f"a path needs at least two layouts on the mesh {mesh}")
    if not 0 <= entry.shared < len(entry.path):
        raise ValueError(f"{entry.shared} steps are said to be shared, but the path has {len(entry.path) - 1}")
    sent = []
    for number, (before, after) in enumerate(pairwise(entry.path)):
        changed = tuple(axis for axis, (old, new) in enumerate(zip(before, after)) if old != new)
        step = step_on(before, after, changed)
        if step is None:
            raise ValueError(
                f"no step leads from {format_layout(before, mesh)} to {format_layout(after, mesh)}; a step changes one "
                "axis, or several alike by one collective"
            )
        if step.communicates and number >= entry.shared:
            sent.append((step.kind, mesh.named(step.axes)))
    for collective in entry.collectives:
        mesh.indices(collective.axis)
        if not 0 <= collective.predicted_s <= MAX_SECONDS or collective.size_bytes < 0:
            raise ValueError(f"{collective} has a size or time that is negative, endless or not a number")
    if entry.kept and (entry.phase != "backward" or not entry.shared):
        raise ValueError("what is kept is read in the backward, and saves it the first steps of a path")
    found = [(collective.kind, collective.axis) for collective in entry.collectives]
    if found != sent:
        said, right = (", ".join(f"{kind} over {axis}" for kind, axis in those) or "none" for those in (found, sent))
        but = f" after its first {entry.shared}, which are shared," if entry.shared else ""
        raise ValueError(
            f"the collectives are {said}, but those of the path {format_path(entry.path, mesh)}{but} are {right}"
        )


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",")] if text.strip() else []


def _parse_layout(text: str, mesh: Mesh) -> Layout:
    if not text:
        raise ValueError("a layout is missing; write one entry per mesh axis, for example dp:S(0) tp:R")
    return parse_layout(text, mesh)


def _format_ms(seconds: float) -> str:
    if seconds == 0:
        return "0"
    ms = Decimal(repr(float(seconds))).scaleb(3).normalize()
    return f"{ms:f}" if -9 <= ms.adjusted() <= 9 else str(ms)


def _parse_ms(text: str) -> float:
    try:
        return float(Decimal(text).scaleb(-3))
    except InvalidOperation:
        raise ValueError(f"cannot read the time {text!r} in milliseconds") from None
