"""The numbers of a plan: predicted seconds, bytes per rank, totals of collectives; for scripts and for tables."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from ...layout import Layout, format_layout, largest_local_shape
from ...micro_batches import held_name, summed_name
from ...recomputation import again_name
from ..dtypes import DTYPE_BYTES
from ..expert_distance import ExpertDistance
from ..memory_outcome import MemoryOutcome
from ..natural_order import starred
from ..plan import Collective, CollectiveKind, Phase, ShardingPlan, TensorEntry
from ..schedule import schedule
from ..simulation import simulate


@dataclass(frozen=True)
class CollectiveTotal:
    """All collectives of one kind on one mesh axis in one phase, as one rank runs them in a step.

    ``size_bytes`` adds up each collective's larger buffer; ``predicted_s`` the predicted times.
    """

    phase: Phase
    kind: CollectiveKind
    axis: str
    count: int
    size_bytes: int
    predicted_s: float


@dataclass(frozen=True)
class AgainTotal:
    """Operators of the forward that the backward computes again, those of all layers together: ``name`` with ``*`` for
    the numbers of layers, how many there are, and their predicted time in the backward, that of what moves for them
    alone included. ``saved_bytes`` need not be kept since the forward; 0 where the plan does not know its memory.
    """

    name: str
    count: int
    predicted_s: float
    saved_bytes: int

    @classmethod
    def together(cls, name: str, totals: Iterable[AgainTotal]) -> AgainTotal:
        """Several as one."""
        found = tuple(totals)
        took_s, saved = math.fsum(each.predicted_s for each in found), sum(each.saved_bytes for each in found)
        return cls(name, sum(each.count for each in found), took_s, saved)


@dataclass(frozen=True)
class HeldTotal:
    """What is held over a step of several micro-batches beside parameters and their gradients, that of all layers
    together: copies of parameters in another layout (``what`` is ``copy``), sums of gradients in another layout than
    the parameter (``sum``).

    ``name`` is the parameter's with ``*`` for the numbers of layers; ``size_bytes`` of the largest shards.
    """

    name: str
    what: Literal["copy", "sum"]
    layout: str
    stored: str
    count: int
    size_bytes: int


@dataclass(frozen=True)
class ScheduleTotal:
    """What travels together: so many collectives for parameters run as ``run``, with ``bucket_bytes`` at most each. So
    many for activations set out ``early``, each alone.

    ``hidden_s`` of the predicted step run beside computation or another axis, if that slows neither down
    (:mod:`autoshard.plans.simulation`): the step takes so much less at best.
    """

    bucket_bytes: int
    gathers_ahead: bool
    planned: int
    run: int
    early: int
    hidden_s: float


@dataclass(frozen=True)
class PlanSummary:
    """The numbers of a plan.

    ``collectives`` is ordered by phase (forward first), kind and axis. ``parameter_bytes`` is the size of all
    parameters, each counted once; ``parameter_bytes_per_rank`` that of the largest shards, which is what rank 0 holds.
    ``recomputed`` is ordered by time, longest first; ``held`` by what it is, and by bytes, most first. ``reduce_dtype``
    is None where there are no gradients.
    ``step_s`` adds all up; in ``overlapped_s`` what hides behind computation costs the ``contention`` of it.
    ``optimizer_s``, ``mfu`` and ``memory`` are None for a plan from before plans knew of them, ``against`` for one that
    was not held against experts. ``network`` says of each axis what it runs on, ``order`` is the rank at each position
    where the last axis does not count fastest; both empty where that is not so.
    """

    model: str
    mesh: str
    ranks: int
    hardware: str
    objective: str
    status: str
    identical_layers: str
    verdict: str
    cost_ns: int
    bound_ns: int
    gap: float
    step_s: float
    contention: float
    overlapped_s: float
    compute_s: float
    communication_s: float
    optimizer_s: float | None
    mfu: float | None
    parameters: int
    parameter_bytes: int
    parameter_bytes_per_rank: int
    operators: int
    redistributions: int
    collectives: tuple[CollectiveTotal, ...]
    recomputed: tuple[AgainTotal, ...]
    param_dtype: str | None
    reduce_dtype: str | None
    micro_batches: int
    held: tuple[HeldTotal, ...]
    schedule: ScheduleTotal
    memory: MemoryOutcome | None
    against: ExpertDistance | None
    network: dict[str, str]
    order: tuple[int, ...]


def summarize(plan: ShardingPlan) -> PlanSummary:
    """Adds up the numbers of a plan: see :class:`PlanSummary`."""
    travelling = _schedule(plan)
    return PlanSummary(
        model=plan.model,
        mesh=str(plan.mesh),
        ranks=plan.mesh.size,
        hardware=plan.hardware,
        objective=plan.objective,
        status=plan.solver.status,
        identical_layers=plan.solver.identical_layers,
        verdict=plan.solver.verdict,
        cost_ns=plan.solver.cost_ns,
        bound_ns=plan.solver.bound_ns,
        gap=plan.solver.gap,
        step_s=plan.step_s,
        contention=plan.contention,
        overlapped_s=plan.hiding_s(travelling.hidden_s),
        compute_s=plan.compute_s,
        communication_s=plan.communication_s,
        optimizer_s=plan.optimizer_s,
        mfu=plan.mfu,
        parameters=len(plan.parameters),
        parameter_bytes=sum(_size_bytes(entry, entry.shape) for entry in plan.parameters),
        parameter_bytes_per_rank=sum(
            _size_bytes(entry, largest_local_shape(entry.shape, entry.layout, plan.mesh)) for entry in plan.parameters
        ),
        operators=len(plan.operators),
        redistributions=len(plan.redistributions),
        collectives=_totals(plan),
        recomputed=_again(plan),
        param_dtype=plan.precision.param_dtype,
        reduce_dtype=plan.precision.reduce_dtype if plan.has_backward else None,
        micro_batches=plan.micro_batches,
        held=_held(plan),
        schedule=travelling,
        memory=plan.memory,
        against=plan.against,
        network=dict(zip(plan.mesh.axes, plan.network)),
        order=plan.mesh.order,
    )


def summary_json(plan: ShardingPlan) -> dict[str, object]:
    """The summary as JSON-ready values: the keys of :class:`PlanSummary`, :class:`CollectiveTotal`,
    :class:`AgainTotal`, :class:`HeldTotal`, :class:`ScheduleTotal`,
    :class:`~autoshard.plans.memory_outcome.MemoryOutcome` and :class:`~autoshard.plans.expert_distance.ExpertDistance`.

    The keys are stable: later versions add some and change none. ``docs/plan_file.md`` lists them.
    """
    summary = summarize(plan)
    collectives = [asdict(total) for total in summary.collectives]
    recomputed = [asdict(total) for total in summary.recomputed]
    memory = None if summary.memory is None else _lists(asdict(summary.memory))
    held = [asdict(total) for total in summary.held]
    lists = {"collectives": collectives, "recomputed": recomputed, "held": held, "order": list(summary.order)}
    against = None if summary.against is None else _lists(asdict(summary.against))
    return {"autoshard_summary": 1, **asdict(summary), **lists, "memory": memory, "against": against}


def _lists(value: object) -> object:
    """The value with lists for tuples, at any depth, as JSON has them."""
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    return [_lists(item) for item in value] if isinstance(value, tuple) else value


def _schedule(plan: ShardingPlan) -> ScheduleTotal:
    buckets = schedule(plan).buckets
    together = [bucket for bucket in buckets if not bucket.is_early]
    planned = sum(len(member.collectives) for bucket in together for member in bucket.members)
    hidden_s = simulate(plan).hidden_ns / 1e9 if buckets else 0.0
    run, every = (sum(len(bucket.travels) for bucket in some) for some in (together, buckets))
    return ScheduleTotal(plan.bucket_bytes, plan.gathers_ahead, planned, run, every - run, hidden_s)


def _totals(plan: ShardingPlan) -> tuple[CollectiveTotal, ...]:
    groups: dict[tuple[bool, str, tuple[int, ...]], list[tuple[Phase, Collective]]] = {}
    for phase, collective in plan.collectives():
        key = (phase != "forward", collective.kind, plan.mesh.indices(collective.axis))
        groups.setdefault(key, []).append((phase, collective))
    return tuple(
        CollectiveTotal(
            phase=group[0][0],
            kind=group[0][1].kind,
            axis=group[0][1].axis,
            count=len(group),
            size_bytes=sum(collective.size_bytes for _, collective in group),
            predicted_s=math.fsum(collective.predicted_s for _, collective in group),
        )
        for _, group in sorted(groups.items())
    )


def _again(plan: ShardingPlan) -> tuple[AgainTotal, ...]:
    again = {again_name(first): first for first in plan.recomputed}
    times_s = {again[entry.name]: entry.predicted_ns / 1e9 for entry in plan.execution if entry.name in again}
    for entry in plan.redistributions:
        if entry.phase == "backward" and entry.consumers and again.keys() >= set(entry.consumers):
            for name in entry.consumers:
                times_s[again[name]] = times_s.get(again[name], 0.0) + entry.predicted_s / len(entry.consumers)
    saved = {} if plan.memory is None else {each.operator: each.size_bytes for each in plan.memory.saved}
    groups: dict[str, list[float]] = {}
    for first in plan.recomputed:
        groups.setdefault(starred(first), []).append(times_s.get(first, 0.0))
    found = (AgainTotal(name, len(group), math.fsum(group), saved.get(name, 0)) for name, group in groups.items())
    return tuple(sorted(found, key=lambda total: (-total.predicted_s, total.name)))


def _held(plan: ShardingPlan) -> tuple[HeldTotal, ...]:
    layouts = {entry.name: entry.outputs[0] for entry in plan.operators} if plan.micro_batches > 1 else {}
    groups: dict[tuple[Literal["copy", "sum"], str, Layout, Layout], list[int]] = {}
    for entry in plan.parameters:
        kinds: tuple[tuple[Literal["copy", "sum"], str], ...] = (
            ("copy", held_name(entry.name)),
            ("sum", summed_name(entry.name)),
        )
        for what, name in kinds:
            layout = layouts.get(name)
            if layout is not None and layout != entry.layout:
                size = _size_bytes(entry, largest_local_shape(entry.shape, layout, plan.mesh))
                groups.setdefault((what, starred(entry.name), layout, entry.layout), []).append(size)
    found = (
        HeldTotal(
            name, what, format_layout(layout, plan.mesh), format_layout(stored, plan.mesh), len(sizes), sum(sizes)
        )
        for (what, name, layout, stored), sizes in groups.items()
    )
    return tuple(sorted(found, key=lambda total: (total.what, -total.size_bytes, total.name)))


def _size_bytes(entry: TensorEntry, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPE_BYTES[entry.dtype]
