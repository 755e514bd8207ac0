"""A search over meshes as rows of a table: one for each shape, and one for each number of devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from ..plans.units import format_enough
from ..plans.views.axis_use import samples, tokens
from ..plans.views.show_contest import memory_bytes
from .search import Candidate, MeshSearch

GIGA = 1e9


@dataclass(frozen=True)
class Row:
    """One shape. What only a plan knows is None where there is none.

    Attributes:
        crossing: the axes that cross hosts, ``dp``; with ``in part`` where some of a group's ranks share a host.
        batch: samples of a step; None where they are not known.
        bound_s: every plan of the shape takes at least that; 0 where it is not known.
        expert, expert_s: the best scheme that people use by hand on this mesh, and its step; None where it was not
            asked for, or there is none.
        reason: why the shape lost.
    """

    mesh: str
    crossing: str
    batch: int | None
    verdict: str
    step_s: float | None
    tokens_per_s: float | None
    samples_per_s: float | None
    mfu: float | None
    memory_bytes: int | None
    gap: float | None
    bound_s: float
    expert: str | None
    expert_s: float | None
    reason: str


def rows_of(search: MeshSearch) -> tuple[Row, ...]:
    """A row for each shape, the best one first."""
    return tuple(_row(each, search.winner) for each in search.candidates)


def _row(candidate: Candidate, winner: Candidate) -> Row:
    plan = candidate.plan
    against = None if plan is None else plan.against
    read, taken = (None, None) if plan is None else (tokens(plan), samples(plan))
    return Row(
        mesh=str(candidate.shape.mesh),
        crossing=_crossing(candidate),
        batch=taken if taken is not None else candidate.samples if candidate.samples > 1 else None,
        verdict=candidate.verdict,
        step_s=None if plan is None else plan.step_s,
        tokens_per_s=None if plan is None or read is None else read / plan.step_s,
        samples_per_s=None if plan is None or taken is None else taken / plan.step_s,
        mfu=None if plan is None else plan.mfu,
        memory_bytes=None if plan is None else memory_bytes(plan),
        gap=None if plan is None else plan.solver.gap,
        bound_s=candidate.bound_ns / 1e9,
        expert=None if against is None else against.expert,
        expert_s=None if against is None else against.step_s,
        reason=_reason(candidate, winner),
    )


def _crossing(candidate: Candidate) -> str:
    words = {"inside hosts": None, "across hosts": "", "inside and across hosts": " in part"}
    shape = candidate.shape
    found = [f"{axis}{words[place]}" for axis, place in zip(shape.mesh.axes, shape.places) if words[place] is not None]
    return ", ".join(found) or "none"


def _reason(candidate: Candidate, winner: Candidate) -> str:
    more = candidate.cost_per_sample / winner.cost_per_sample - 1
    if candidate.verdict == "best":
        return ""
    if candidate.verdict == "slower":
        unsolved = candidate.bound_ns / candidate.samples < winner.cost_per_sample
        return f"{more:.2%} slower{', as far as it was solved' * unsolved}"
    if candidate.verdict == "cut":
        return f"cut by its bound: at least {more:.2%} slower"
    if candidate.verdict == "does not fit" and candidate.least_bytes is not None:
        return f"does not fit: the least found to do is {format_enough(candidate.least_bytes)}"
    return candidate.reason


@dataclass(frozen=True)
class ScalingRow:
    """The best mesh of a number of devices.

    Attributes:
        per_s: tokens a second of all devices, or samples where the model reads no tokens.
        unit: which of the two.
        efficiency: the rate of a device over that with the fewest devices.
        device_hours: of a billion tokens or samples.
        cost: of a billion tokens or samples, in the currency of the price; None without one.
        reason: why there is no plan; the others are None then.
    """

    devices: int
    mesh: str | None = None
    batch: int | None = None
    step_s: float | None = None
    per_s: float | None = None
    unit: str = ""
    mfu: float | None = None
    efficiency: float | None = None
    device_hours: float | None = None
    cost: float | None = None
    reason: str = ""


def scaling_of(
    searches: Iterable[MeshSearch], failed: Sequence[tuple[int, str]] = (), price: float | None = None
) -> tuple[ScalingRow, ...]:
    """A row for each number of devices, the fewest first; those that ``failed`` say why.

    Args:
        price: of a device for an hour.
    """
    found: list[ScalingRow] = []
    for search in sorted(searches, key=lambda each: each.devices):
        plan, row = search.plan, rows_of(search)[0]
        unit, per_s = ("tokens", row.tokens_per_s) if row.tokens_per_s else ("samples", row.samples_per_s)
        first = found[0] if found else None
        base = None if first is None or first.per_s is None else first.per_s / first.devices
        efficiency = None if per_s is None else 1.0 if base is None else per_s / search.devices / base
        hours = None if per_s is None else search.devices * GIGA / per_s / 3600
        cost = None if hours is None or price is None else hours * price
        of_plan = row.mesh, row.batch, plan.step_s, per_s, unit, plan.mfu
        found.append(ScalingRow(search.devices, *of_plan, efficiency, hours, cost))
    lost = [ScalingRow(devices, reason=reason) for devices, reason in failed]
    return tuple(sorted((*found, *lost), key=lambda row: row.devices))


def searches_json(
    searches: Sequence[MeshSearch], failed: Sequence[tuple[int, str]] = (), price: float | None = None
) -> dict[str, object]:
    """Everything as JSON-ready values; later versions add keys and change none."""
    return {
        "autoshard_search": 1,
        "devices": [asdict(row) for row in scaling_of(searches, failed, price)],
        "meshes": {str(search.devices): [asdict(row) for row in rows_of(search)] for search in searches},
    }
