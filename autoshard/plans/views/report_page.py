"""What the pages of the report have in common: their templates, their one style sheet and script, the bars of a step.

Names in a plan come from anywhere, so every value is escaped by the template engine, and a page's content policy allows
the one script and the one style sheet by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from ..units import format_bytes, format_gap, format_seconds
from .columns import bytes_column, seconds_column
from .expensive import MOST_EXPENSIVE
from .expert_words import part_name
from .layer_map import COLUMNS, tone
from .report_values import Part, tenant_words

CHART_WIDTH = 1000


@dataclass(frozen=True)
class StepBar:
    """The predicted step of a plan as one bar of the chart; each part has its left end and its width."""

    name: str
    total_s: float
    parts: tuple[tuple[Part, float, float], ...]


def rendered(template: str, **values: Any) -> str:
    """A page: a template filled with values."""
    environment = Environment(
        loader=FunctionLoader(_file), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["at_dots"] = _at_dots
    style, script = _file("report.css"), _file("report.js")
    return environment.get_template(template).render(
        style=style,
        style_hash=_digest(style),
        script=script,
        script_hash=_digest(script),
        seconds=format_seconds,
        bytes=format_bytes,
        gap=format_gap,
        seconds_column=seconds_column,
        bytes_column=bytes_column,
        tenant_words=tenant_words,
        part_name=part_name,
        tone=tone,
        map_columns=COLUMNS,
        most_expensive=MOST_EXPENSIVE,
        **values,
    )


def step_bars(splits: Sequence[tuple[str, list[Part]]]) -> list[StepBar]:
    """The parts of each plan's step as a bar; the longest has the whole width."""
    longest = max(sum(part.seconds for part in parts) for _, parts in splits) or 1.0
    bars = []
    for name, parts in splits:
        placed, x = [], 0.0
        for part in parts:
            width = CHART_WIDTH * part.seconds / longest
            placed.append((part, round(x, 2), round(width, 2)))
            x += width
        bars.append(StepBar(name, sum(part.seconds for part in parts), tuple(placed)))
    return bars


def parts_of(splits: Sequence[tuple[str, list[Part]]]) -> list[tuple[str, str, list[float | None]]]:
    """Each part's name and colour, and its seconds in every plan."""
    colours: dict[str, str] = {}
    for part in (part for _, parts in splits for part in parts):
        colours.setdefault(part.name, part.colour)
    by_plan = [{part.name: part.seconds for part in parts} for _, parts in splits]
    return [(name, colour, [seconds.get(name) for seconds in by_plan]) for name, colour in colours.items()]


def _at_dots(text: str) -> Markup:
    """A name, or a sentence with some, that may go on in the next line behind a dot or a slash."""
    return Markup(re.sub(r"(?<=[./])(?=[A-Za-z_*])", "<wbr>", str(escape(text))))


def _file(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The digest by which the page's content security policy allows this style sheet or script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
