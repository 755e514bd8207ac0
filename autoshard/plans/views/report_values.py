"""The parts of the predicted step that the report of a plan draws, and the words for what is in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...micro_batches import operator_runs
from ..memory_outcome import TenantKind
from ..plan import ShardingPlan


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
    copies = copies_s(plan)
    if copies > 1e-9:
        parts.append(Part("local copies", copies, "copies"))
    if plan.optimizer_s:
        parts.append(Part("optimizer", plan.optimizer_s, "optimizer"))
    return parts


def copies_s(plan: ShardingPlan) -> float:
    """What redistributions copy within a rank, in seconds: communication that is no collective."""
    return plan.communication_s - math.fsum(c.predicted_s for _, c in plan.collectives())


def _compute_s(plan: ShardingPlan, phase: str) -> float:
    """Seconds of the operators of a phase in a step."""
    runs = ((operator_runs(e.name, plan.micro_batches), e.predicted_ns) for e in plan.execution if e.phase == phase)
    return math.fsum(times * took for times, took in runs) / 1e9


def tenant_words(plan: ShardingPlan) -> Callable[[TenantKind], str]:
    """What holds memory at the peak, in a word or two."""
    steps = plan.memory is not None and plan.memory.peak.phase == "optimizer"
    words = {"optimizer": "optimizer state", "temporary": "work of the optimizer" if steps else "copy"}
    return lambda kind: words.get(kind, kind)
