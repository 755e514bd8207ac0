"""The entries of a profile file: their ranges, and the values they become.

``docs/cost_models.md`` shows a file and names its entries. Version 2 added ``based_on``, ``torus``, ``axes``, and in a
link ``launches_s``, ``curves`` and ``alternatives``; knots in place of an efficiency; and a provenance of several
entries. A file of version 1 is one of version 2 without them, and is read as such.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from .collective_kinds import CollectiveKind
from .compute import Compute, Dtype, Efficiency
from .curve import Curve
from .errors import ProfileError
from .hosts import Hosts
from .kernel_kinds import OP_KINDS
from .link import Algorithm, Hops, Link
from .measured import MeasuredMesh
from .profile import Network, Profile
from .provenance import Provenance, Residual
from .spelling import did_you_mean
from .torus import Torus

MAX_ERRORS_SHOWN = 5


def profile_of(entries: Mapping[Any, Any]) -> Profile:
    """The profile that the entries of a file describe.

    Raises:
        ProfileError: entries are missing, unknown or out of their range; the message names the first of them.
    """
    try:
        return _ProfileEntry.model_validate(entries).value()
    except ValidationError as reason:
        problems = [_problem(dict(error)) for error in reason.errors(include_url=False)]
    shown = problems[:MAX_ERRORS_SHOWN]
    rest = f" (and {len(problems) - len(shown)} more)" if len(problems) > len(shown) else ""
    raise ProfileError("; ".join(shown) + rest)


def _whole(value: Any) -> Any:
    """A float that is a whole number, such as ``80e9``, as an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _iso_date(value: str) -> str:
    try:
        return datetime.date.fromisoformat(value).isoformat()
    except ValueError:
        raise ValueError(f"{value!r} is no date; write it as 2026-11-20") from None


def _kernel(value: str) -> str:
    kind, _, dtype = value.partition("/")
    if value == "default" or (kind in OP_KINDS and (dtype in get_args(Dtype) or value == kind)):
        return value
    known = ("default", *OP_KINDS)
    raise ValueError(
        f"{value!r} is no kind of kernel{did_you_mean(kind, known)}; write one of {', '.join(known)}, or kind/dtype "
        "as in matmul/bfloat16"
    )


def _rising(pairs: list[list[float]]) -> list[list[float]]:
    """Knots whose first numbers rise."""
    for i, ((before, _), (after, _)) in enumerate(pairwise(pairs), start=1):
        if after <= before:
            raise ValueError(f"knot {i} is at {after:g}, not above the {before:g} of the knot before it")
    return pairs


def _rising_seconds(pairs: list[list[float]]) -> list[list[float]]:
    """Knots of (bytes, seconds) whose seconds never fall, and rise at the end, which is where the curve goes on."""
    for i, ((_, before), (_, after)) in enumerate(pairwise(pairs), start=1):
        if after < before:
            raise ValueError(f"the curve is not monotone: knot {i} has {after:g} s after {before:g} s for fewer bytes")
    if len(pairs) > 1 and pairs[-1][1] == pairs[-2][1]:
        raise ValueError(f"the last two knots both have {pairs[-1][1]:g} s; beyond them bytes would cost nothing")
    return pairs


def _rising_work(pairs: list[list[float]]) -> list[list[float]]:
    """Knots of (amount, share) whose time, ``amount / share``, never falls."""
    for i, ((before, low), (after, high)) in enumerate(pairwise(pairs), start=1):
        if after / high < before / low:
            raise ValueError(
                f"the efficiency is not monotone in time: knot {i}, {after:g} at {high:g} of the peak, takes less time "
                f"than {before:g} at {low:g}"
            )
    for amount, share in pairs:
        if share > 1:
            raise ValueError(f"the share {share:g} at {amount:g} is above 1")
    return pairs


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Words = Annotated[str, Field(min_length=1, max_length=4000), AfterValidator(str.strip)]
Pair = Annotated[list[Positive], Field(min_length=2, max_length=2)]
CurveKnots = Annotated[list[Pair], Field(min_length=1), AfterValidator(_rising), AfterValidator(_rising_seconds)]
ShareKnots = Annotated[list[Pair], Field(min_length=1), AfterValidator(_rising), AfterValidator(_rising_work)]
ShareEntry = Annotated[
    Annotated[Share, Tag("share")] | Annotated[ShareKnots, Tag("knots")],
    Discriminator(lambda value: "knots" if isinstance(value, list) else "share"),
]
Kernel = Annotated[str, AfterValidator(_kernel)]
Axis = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\+[A-Za-z_]\w*)*$")]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _AlgorithmEntry(_Entry):
    name: Words
    hops: Hops
    launch_s: Seconds
    latency_s: Seconds
    bandwidth_share: Share


class _LinkEntry(_Entry):
    name: Words
    launch_s: Seconds
    latency_s: Seconds
    bandwidth_bytes_per_s: Positive
    efficiency: dict[CollectiveKind, Share] = {}
    launches_s: dict[CollectiveKind, Seconds] = {}
    curves: dict[CollectiveKind, CurveKnots] = {}
    alternatives: list[_AlgorithmEntry] = []
    hop_inside_s: Seconds = 0.0
    reduce_scatter_as_all_reduce: bool = False

    @model_validator(mode="after")
    def _all_reduce_holds_a_reduce_scatter(self) -> _LinkEntry:
        if not self.reduce_scatter_as_all_reduce:
            _check_all_reduce(self.value())
        return self

    def value(self) -> Link:
        return Link(
            name=self.name,
            launch_s=self.launch_s,
            latency_s=self.latency_s,
            bandwidth_bytes_per_s=self.bandwidth_bytes_per_s,
            efficiency=_by_name(self.efficiency),
            launches_s=_by_name(self.launches_s),
            curves={kind: Curve.through((x, y) for x, y in knots) for kind, knots in self.curves.items()},
            alternatives=tuple(Algorithm(**algorithm.model_dump()) for algorithm in self.alternatives),
            hop_inside_s=self.hop_inside_s,
            reduce_scatter_as_all_reduce=self.reduce_scatter_as_all_reduce,
        )


def _check_all_reduce(link: Link) -> None:
    """Raises ValueError where an all-reduce would cost less than the reduce-scatter inside it."""
    why = "so an all-reduce would cost less than the reduce-scatter inside it"
    if link.start_s("all_reduce") < link.start_s("reduce_scatter"):
        raise ValueError(
            f"launches are not monotone: all_reduce {link.start_s('all_reduce'):g} s is below reduce_scatter "
            f"{link.start_s('reduce_scatter'):g} s, {why}"
        )
    reduce, scatter = link.efficiency.get("all_reduce", 1.0), link.efficiency.get("reduce_scatter", 1.0)
    if not {"all_reduce", "reduce_scatter"} & set(link.curves):
        if reduce > 2 * scatter:
            raise ValueError(
                f"efficiency is not monotone: all_reduce {reduce:g} is above twice reduce_scatter {scatter:g}, {why}"
            )
        return
    if link.alternatives and len({"all_reduce", "reduce_scatter"} & set(link.curves)) == 1:
        raise ValueError("curves: with alternatives, all_reduce and reduce_scatter both have a curve or neither has")
    curves = [link.curves[kind].knots for kind in ("all_reduce", "reduce_scatter") if kind in link.curves]
    sent = np.array([x * factor for knots in curves for x, _ in knots for factor in (0.5, 1.0, 2.0**40)])
    less = link.transfer_s("all_reduce", 2 * sent) < link.transfer_s("reduce_scatter", sent) * (1 - 1e-9)
    if np.any(less):
        raise ValueError(
            f"curves are not monotone: where a reduce_scatter sends {sent[less][0]:g} bytes an all_reduce sends twice "
            f"as many in less time, {why}"
        )


class _LinksEntry(_Entry):
    intra_host: _LinkEntry
    inter_host: _LinkEntry | None = None


class _MeasuredEntry(_LinkEntry):
    size: Count


class _TorusEntry(_Entry):
    shape: Annotated[list[Count], Field(min_length=1, max_length=6)]
    wraparound: bool | list[bool] = True
    slices: list[Annotated[list[Count], Field(min_length=1, max_length=6)]] = []

    @model_validator(mode="after")
    def _slices_fit(self) -> _TorusEntry:
        if isinstance(self.wraparound, list) and len(self.wraparound) != len(self.shape):
            raise ValueError(f"wraparound has {len(self.wraparound)} entries for {len(self.shape)} dimensions")
        sizes = [math.prod(slice_) for slice_ in self.slices]
        for slice_ in self.slices:
            if len(slice_) != len(self.shape) or any(part > whole for part, whole in zip(slice_, self.shape)):
                raise ValueError(f"the slice {slice_} is no part of a torus of {self.shape}")
        if len({*sizes, math.prod(self.shape)}) != len(sizes) + 1:
            raise ValueError("two slices have the same number of devices (the whole torus counts as one)")
        return self

    def value(self) -> Torus:
        dims = len(self.shape)
        wraps = tuple(self.wraparound) if isinstance(self.wraparound, list) else (self.wraparound,) * dims
        return Torus(tuple(self.shape), wraps, {math.prod(slice_): tuple(slice_) for slice_ in self.slices})


class _ComputeEntry(_Entry):
    launch_s: Seconds
    issue_s: Seconds = 0.0
    optimizer_launch_s: Seconds = 0.0
    memory_bandwidth_bytes_per_s: Positive
    peak_flops_per_s: dict[Dtype, Positive]
    compute_efficiency: dict[Kernel, ShareEntry]
    memory_efficiency: dict[Kernel, ShareEntry]

    @model_validator(mode="after")
    def _fallbacks_are_there(self) -> _ComputeEntry:
        if "float32" not in self.peak_flops_per_s:
            raise ValueError("peak_flops_per_s.float32 is missing (integers and booleans are priced by it)")
        for table in ("compute_efficiency", "memory_efficiency"):
            if "default" not in getattr(self, table):
                raise ValueError(f"{table}.default is missing (it stands for the kinds that are not named)")
        return self

    def value(self) -> Compute:
        return Compute(
            launch_s=self.launch_s,
            issue_s=self.issue_s,
            optimizer_launch_s=self.optimizer_launch_s,
            memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s,
            peak_flops_per_s=_by_name(self.peak_flops_per_s),
            compute_efficiency=_shares(self.compute_efficiency),
            memory_efficiency=_shares(self.memory_efficiency),
        )


def _by_name(table: Mapping[Any, float]) -> dict[str, float]:
    return dict(table)


def _shares(table: Mapping[str, float | list[list[float]]]) -> dict[str, float | Efficiency]:
    return {
        kind: Efficiency(tuple((x, y) for x, y in share)) if isinstance(share, list) else share
        for kind, share in table.items()
    }


class _ResidualEntry(_Entry):
    median: Seconds
    largest: Seconds
    points: Count

    @model_validator(mode="after")
    def _largest_is_largest(self) -> _ResidualEntry:
        if self.largest < self.median:
            raise ValueError(f"the largest error {self.largest:g} is below the median {self.median:g}")
        return self

    def value(self) -> Residual:
        return Residual(self.median, self.largest, self.points)


class _ResidualsEntry(_Entry):
    collectives: dict[Words, dict[CollectiveKind, _ResidualEntry]] = {}
    kernels: dict[Kernel, _ResidualEntry] = {}
    together: dict[Words, dict[CollectiveKind, _ResidualEntry]] = {}
    rows: dict[Literal["alone", "with a collective"], _ResidualEntry] = {}


class _ProvenanceEntry(_Entry):
    sources: Words
    machine: Words = ""
    versions: dict[Words, Words] = {}
    date: Annotated[Words, AfterValidator(_iso_date)] = ""
    command: Words = ""
    residuals: _ResidualsEntry = _ResidualsEntry()

    def value(self) -> Provenance:
        return Provenance(
            sources=self.sources,
            machine=self.machine,
            date=self.date,
            command=self.command,
            versions=dict(self.versions),
            collectives=_residuals_by_axis(self.residuals.collectives),
            kernels={kind: entry.value() for kind, entry in self.residuals.kernels.items()},
            together=_residuals_by_axis(self.residuals.together),
            rows={name: entry.value() for name, entry in self.residuals.rows.items()},
        )


def _residuals_by_axis(entries: Mapping[str, Mapping[Any, _ResidualEntry]]) -> dict[str, dict[str, Residual]]:
    return {axis: {kind: entry.value() for kind, entry in kinds.items()} for axis, kinds in entries.items()}


def _as_sources(value: Any) -> Any:
    """A provenance that is plain text means one that has nothing but these sources."""
    return {"sources": value} if isinstance(value, str) else value


class _ProfileEntry(_Entry):
    version: Literal[1, 2]
    name: Words
    provenance: Annotated[_ProvenanceEntry, BeforeValidator(_as_sources)]
    memory_bytes: Count
    allocator_margin: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    contention: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    meeting_s: Seconds = 0.0
    bucket_copies: bool = False
    compute: _ComputeEntry
    devices_per_host: Count | Literal["any"] | None = None
    torus: _TorusEntry | None = None
    links: _LinksEntry | None = None
    axes: Annotated[dict[Axis, _MeasuredEntry], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_network(self) -> _ProfileEntry:
        if (self.links is None) == (self.axes is None):
            found = "neither is there" if self.links is None else "both are there"
            raise ValueError(f"a profile has either links (of any mesh) or axes (of one measured mesh); {found}")
        if self.links and self.devices_per_host is None:
            raise ValueError("devices_per_host is missing (a number, or: any)")
        if self.axes and (self.devices_per_host or self.torus):
            raise ValueError("devices_per_host and torus belong to links; axes have their own size")
        if self.torus and self.links and (self.links.intra_host.curves or self.links.intra_host.alternatives):
            raise ValueError("links.intra_host of a torus is one link: it has neither curves nor alternatives")
        if self.torus and self.devices_per_host != math.prod(self.torus.shape):
            raise ValueError(
                f"devices_per_host is {self.devices_per_host}, but a torus of {self.torus.shape} has "
                f"{math.prod(self.torus.shape)} devices"
            )
        return self

    @model_validator(mode="after")
    def _groups_are_of_axes(self) -> _ProfileEntry:
        single = [name for name in self.axes or {} if "+" not in name]
        for name, entry in (self.axes or {}).items():
            members = name.split("+")
            if [axis for axis in single if axis in members] != members:
                raise ValueError(f"axes.{name}: a group names axes of the profile in their order ({', '.join(single)})")
            size = math.prod(self.axes[axis].size for axis in members) if self.axes else 0
            if entry.size != size:
                raise ValueError(f"axes.{name}.size is {entry.size}, but its axes have {size} ranks")
        return self

    def value(self) -> Profile:
        return Profile(
            name=self.name,
            provenance=self.provenance.value(),
            memory_bytes=self.memory_bytes,
            compute=self.compute.value(),
            network=self._network(),
            allocator_margin=self.allocator_margin,
            contention=self.contention,
            meeting_s=self.meeting_s,
            bucket_copies=self.bucket_copies,
        )

    def _network(self) -> Network:
        if self.links:
            return Hosts(
                devices_per_host=None if self.devices_per_host == "any" else self.devices_per_host,
                intra_host=self.links.intra_host.value(),
                inter_host=self.links.inter_host.value() if self.links.inter_host else None,
                torus=self.torus.value() if self.torus else None,
            )
        assert self.axes is not None
        single = {name: entry for name, entry in self.axes.items() if "+" not in name}
        return MeasuredMesh(
            axes=tuple(single),
            shape=tuple(entry.size for entry in single.values()),
            links=tuple(entry.value() for entry in single.values()),
            flattened={tuple(name.split("+")): entry.value() for name, entry in self.axes.items() if "+" in name},
        )


_TAGS = frozenset({"[key]", "int", "literal['any']", "share", "knots"})
_ENTRY_NAMES = sorted(
    {"based_on"}
    | {
        name
        for entry in (_ProfileEntry, _ProvenanceEntry, _ComputeEntry, _LinksEntry, _MeasuredEntry, _TorusEntry)
        for name in entry.model_fields
    }
)


def _problem(error: dict[str, Any]) -> str:
    """One fault in the words of the file: which entry, what was found, what is expected."""
    where = ".".join(str(part) for part in error["loc"] if part not in _TAGS)
    if error["type"] == "missing":
        return f"{where} is missing"
    if error["type"] == "extra_forbidden":
        return f"{where} is not an entry of a profile{did_you_mean(where.rpartition('.')[2], _ENTRY_NAMES)}"
    expected = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if error["type"] == "value_error":
        return f"{where}: {expected}" if where else expected
    return f"{where} is {error['input']!r:.60}, expected {expected}"
