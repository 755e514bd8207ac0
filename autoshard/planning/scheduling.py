"""A plan with what it needs in memory, and with a schedule where there is room for it."""

from __future__ import annotations

from dataclasses import replace

from ..capture import CapturedGraph
from ..plans import ShardingPlan
from ..plans.schedule import schedule
from .limit import MemoryLimit
from .timeline import timeline_of


def scheduled(graph: CapturedGraph, plan: ShardingPlan, limit: MemoryLimit, bucket_bytes: int) -> ShardingPlan:
    """The plan with its memory, and with the schedule of buckets of ``bucket_bytes``.

    It is left without a schedule where nothing can travel ahead or together, and where what is in flight then takes
    more memory than the limit allows.
    """
    allowed = limit.allowed_bytes
    for wanted in dict.fromkeys((bucket_bytes, 0)):
        candidate = replace(plan, bucket_bytes=wanted)
        if wanted and not schedule(candidate).buckets:
            continue
        timeline = timeline_of(graph, candidate, limit.policy)
        if not wanted or allowed is None or timeline.peak.size_bytes <= allowed:
            break
    return replace(candidate, memory=limit.outcome(timeline))
