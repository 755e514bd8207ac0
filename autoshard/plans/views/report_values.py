"""The parts of the predicted step that the report of a plan draws, and the words for what is in memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from ...micro_batches import operator_runs
from ..memory_outcome import MemoryTenant
from ..natural_order import starred
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


def tenant_words(plan: ShardingPlan) -> Callable[[MemoryTenant], str]:
    """What a tenant is, in a word or two: a ``kept copy`` was made by the forward and is read by the backward."""
    peak = None if plan.memory is None else plan.memory.peak.phase
    phases: dict[str, set[str]] = defaultdict(set)
    for entry in plan.redistributions:
        phases[starred(entry.tensor)].add("kept" if entry.kept else entry.phase)

    def words(tenant: MemoryTenant) -> str:
        if tenant.kind == "optimizer":
            return "optimizer state"
        if tenant.kind != "temporary":
            return tenant.kind
        made = phases[tenant.name]
        is_kept = "kept" in made or (peak == "backward" and made == {"forward"})
        return "kept copy" if is_kept else "work of the optimizer" if peak == "optimizer" else "copy"

    return words
