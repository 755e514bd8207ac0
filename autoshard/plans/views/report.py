"""A plan as one HTML file that opens offline: it fetches nothing, and runs no script but its own."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import ShardingPlan
from .axis_use import NOT_MODELLED
from .diff import diff_plans
from .report_page import parts_of, rendered, step_bars
from .report_subject import Subject
from .report_values import cost_split


def report_html(
    plan: ShardingPlan,
    baselines: Sequence[tuple[str, ShardingPlan]] = (),
    name: str = "this plan",
    network: Sequence[str] = (),
) -> str:
    """The report of a plan, compared with ``baselines``, each with the name it is shown by.

    ``network`` says in sentences what the mesh runs on, which a plan itself does not know.
    """
    subject = Subject.of(name, plan, network)
    splits = [(label, cost_split(one)) for label, one in ((name, plan), *baselines)]
    return rendered(
        "report.html",
        title=f"Sharding plan of {plan.model}",
        subject=subject,
        bars=step_bars(splits),
        parts=parts_of(splits),
        not_modelled=NOT_MODELLED,
        differences=[(label, diff_plans(one, plan)) for label, one in baselines],
    )
