"""A plan as one HTML file that opens offline: it fetches nothing, and runs no script but its own.

Names in a plan come from anywhere, so every value is escaped by the template engine, and the page's content policy
allows the one script and the one style sheet by their digests.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined

from ..plan import ShardingPlan
from ..text.folded_plan import fold_plan
from ..text.layout_preserving import preserves_layout
from ..text.name_patterns import format_pattern
from ..text.notation import format_strategy
from ..units import format_bytes, format_seconds
from .axis_use import use_lines
from .diff import diff_plans
from .module_tree import module_tree
from .report_values import Part, cost_split, layer_maps, memory_chart, palette
from .summary import CollectiveTotal, summarize

CHART_WIDTH = 1000


@dataclass(frozen=True)
class _Bar:
    """The predicted step of a plan as one bar of the chart; each part has its left end and its width in pixels."""

    name: str
    total_s: float
    parts: tuple[tuple[Part, float, float], ...]


def report_html(plan: ShardingPlan, baselines: Sequence[tuple[str, ShardingPlan]] = (), name: str = "this plan") -> str:
    """The report of a plan, compared with ``baselines``, each with the name it is shown by."""
    folded, summary = fold_plan(plan), summarize(plan)
    maps = layer_maps(plan, folded)
    style, script = _file("report.css"), _file("report.js")
    splits = [(label, cost_split(one)) for label, one in ((name, plan), *baselines)]
    tree = module_tree(plan, folded)
    whole_s = max(tree.compute_s + tree.communication_s, 1e-12)
    communication_s = max(sum(total.predicted_s for total in summary.collectives), 1e-12)

    def share(total: CollectiveTotal) -> float:
        return 100 * total.predicted_s / communication_s

    def percent(seconds: float) -> float:
        return 100 * seconds / whole_s

    environment = Environment(
        loader=FunctionLoader(_file), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template("report.html").render(
        plan=plan,
        summary=summary,
        style=style,
        style_hash=_digest(style),
        script=script,
        script_hash=_digest(script),
        uses=use_lines(plan),
        bars=_bars(splits),
        parts=_parts(splits),
        differences=[(label, diff_plans(one, plan).words) for label, one in baselines],
        maps=maps,
        colours=palette(maps),
        tree=tree,
        chart=memory_chart(plan),
        operators=[
            (
                format_pattern(line.pattern, folded.repeats),
                line.value.phase,
                format_strategy(line.value, plan.mesh),
                line.pattern.count,
            )
            for line in folded.operators
            if not preserves_layout(line.value)
        ],
        seconds=format_seconds,
        bytes=format_bytes,
        share=share,
        percent=percent,
    )


def _bars(splits: Sequence[tuple[str, list[Part]]]) -> list[_Bar]:
    longest = max(sum(part.seconds for part in parts) for _, parts in splits) or 1.0
    bars = []
    for name, parts in splits:
        placed, x = [], 0.0
        for part in parts:
            width = CHART_WIDTH * part.seconds / longest
            placed.append((part, round(x, 2), round(width, 2)))
            x += width
        bars.append(_Bar(name, sum(part.seconds for part in parts), tuple(placed)))
    return bars


def _parts(splits: Sequence[tuple[str, list[Part]]]) -> list[tuple[str, str, list[float | None]]]:
    """Each part's name and colour, and its seconds in every plan."""
    colours = {part.name: part.colour for _, parts in splits for part in parts}
    by_plan = [{part.name: part.seconds for part in parts} for _, parts in splits]
    return [(name, colour, [seconds.get(name) for seconds in by_plan]) for name, colour in colours.items()]


def _file(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """The digest by which the page's content security policy allows this style sheet or script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
