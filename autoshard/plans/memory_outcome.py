"""What a plan needs in memory on one rank: the most bytes in use at a time, who holds them, and the use over a step.

A budget is of what the device counts, and that is more than is in use: an allocator reserves ``margin`` times as much
beside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from .units import format_bytes

MemoryPhase = Literal["forward", "backward", "optimizer"]
TenantKind = Literal[
    "parameter", "gradient", "optimizer", "buffer", "input", "activation", "kept copy", "temporary", "output"
]
TENANT_KINDS: tuple[TenantKind, ...] = get_args(TenantKind)

MAX_POINTS = 128
MAX_TENANTS = 12


def allowed_bytes(budget_bytes: int, margin: float) -> int:
    """The most bytes in use for which an allocator reserves no more than a budget.

    >>> allowed_bytes(109, 0.09), reserved_bytes(100, 0.09)
    (100, 109)
    """
    return math.floor(budget_bytes / _reserved_per_byte(margin))


def reserved_bytes(size_bytes: int, margin: float) -> int:
    """What an allocator reserves for bytes in use: the least budget that allows them."""
    return math.ceil(size_bytes * _reserved_per_byte(margin))


def _reserved_per_byte(margin: float) -> Fraction:
    return 1 + Fraction(str(margin))  # as it is written: 0.09 is nine hundredths


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes in use on one rank while an operator runs; ``operator`` is its name, or ``step`` in the optimizer."""

    phase: MemoryPhase
    operator: str
    size_bytes: int


@dataclass(frozen=True)
class MemoryTenant:
    """Tensors of one kind that are alive at the peak: ``count`` of them, ``size_bytes`` together.

    Identical layers are one tenant: in ``name`` their numbers are written ``*`` (``layers.*.norm.weight``).
    """

    name: str
    kind: TenantKind
    count: int
    size_bytes: int


@dataclass(frozen=True)
class MemoryKind:
    """Bytes of one kind at each point of the course of a step. A ``kept copy`` of a tensor in another layout was made
    by the forward and is there until the backward has read it; a ``temporary`` one is on its way in one phase.
    """

    kind: TenantKind
    size_bytes: tuple[int, ...]


@dataclass(frozen=True)
class MemorySaved:
    """What need not be kept since the forward because an operator is computed again: ``size_bytes`` of what it makes,
    as far as others of the backward read that. Those of identical layers together: ``operator`` is the name of the
    first one with ``*`` for their numbers.
    """

    operator: str
    size_bytes: int


@dataclass(frozen=True)
class MemoryOutcome:
    """Memory of the rank that holds the largest shards (the one at coordinate 0), in bytes.

    Attributes:
        optimizer: the policy that the optimizer's state was counted under.
        budget_bytes: the limit that the plan was made under, of what the allocator reserves; None for none.
        soft_ms_per_gib: where the limit is soft, what one GiB above it costs, in milliseconds; None for a hard one.
        parameter_bytes, gradient_bytes, optimizer_bytes, buffer_bytes, input_bytes: what is held whatever runs.
        peak: the fullest moment of a training step.
        tenants: the largest that are alive there, largest first, at most MAX_TENANTS.
        other_bytes: what the others hold at the peak; with the tenants it adds up to ``peak.size_bytes``.
        timeline: the course of a step in at most MAX_POINTS points: each is the fullest moment of its part.
        allocator_margin: what the allocator of the machine reserves beyond what is in use, as a share of that.
        saved: what computing operators again saves, most first; operators that save nothing themselves are not among
            them (what one makes may be read by others that are computed again alone).
        kinds: what each point of the timeline is made of, in the order of TENANT_KINDS; empty where it is not known.

    Raises:
        ValueError: the sizes do not add up, one is negative, or an operator saves twice.
    """

    optimizer: str
    budget_bytes: int | None
    soft_ms_per_gib: float | None
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    input_bytes: int
    peak: MemoryPoint
    tenants: tuple[MemoryTenant, ...]
    other_bytes: int
    timeline: tuple[MemoryPoint, ...]
    allocator_margin: float = 0.0
    saved: tuple[MemorySaved, ...] = ()
    kinds: tuple[MemoryKind, ...] = ()

    def __post_init__(self) -> None:
        held = sum(tenant.size_bytes for tenant in self.tenants) + self.other_bytes
        if held != self.peak.size_bytes:
            raise ValueError(f"the tenants of the peak hold {held} bytes together, the peak is {self.peak.size_bytes}")
        fullest = max((point.size_bytes for point in self.timeline), default=self.peak.size_bytes)
        if fullest != self.peak.size_bytes:
            raise ValueError(f"the timeline's fullest point has {fullest} bytes, the peak {self.peak.size_bytes}")
        if self.kinds:
            self._check_kinds()
        always = self.parameter_bytes + self.optimizer_bytes + self.buffer_bytes + self.input_bytes
        if always > self.peak.size_bytes:
            raise ValueError(f"{always} bytes are held whatever runs, more than the peak of {self.peak.size_bytes}")
        sizes = [point.size_bytes for point in (self.peak, *self.timeline)]
        sizes += [tenant.size_bytes for tenant in self.tenants] + [each.size_bytes for each in self.saved]
        if len({each.operator for each in self.saved}) != len(self.saved):
            raise ValueError("an operator that is computed again saves memory twice")
        if min(self.other_bytes, self.static_bytes, *sizes) < 0:
            raise ValueError("a size in memory is negative")
        price = self.soft_ms_per_gib
        if price is not None and (self.budget_bytes is None or not (0 <= price < math.inf)):
            raise ValueError(f"{price} ms per GiB over the budget {self.budget_bytes} is no soft limit")

    def _check_kinds(self) -> None:
        names = [each.kind for each in self.kinds]
        if names != [kind for kind in TENANT_KINDS if kind in names]:
            raise ValueError(f"the kinds of memory are {', '.join(names)}, not each once in their order")
        points = len(self.timeline)
        if not points or any(len(each.size_bytes) != points or min(each.size_bytes) < 0 for each in self.kinds):
            raise ValueError(f"a kind of memory does not have a size for each of the {points} points of the timeline")
        for point, *sizes in zip(self.timeline, *(each.size_bytes for each in self.kinds)):
            if sum(sizes) != point.size_bytes:
                found = f"{sum(sizes)} bytes at {point.operator}, where {point.size_bytes} are in use"
                raise ValueError(f"the kinds of memory add up to {found}")
        for kind, size in self.others.items():
            if size < 0:
                raise ValueError(f"the tenants of the peak hold {-size} bytes more of the kind {kind} than are in use")

    @property
    def others(self) -> dict[TenantKind, int]:
        """By kind, what those hold at the peak that are not among the tenants; empty where kinds are not known."""
        peak = next((k for k, point in enumerate(self.timeline) if point.size_bytes == self.peak.size_bytes), 0)
        named: dict[TenantKind, int] = dict.fromkeys(TENANT_KINDS, 0)
        for tenant in self.tenants:
            named[tenant.kind] += tenant.size_bytes
        left = {each.kind: each.size_bytes[peak] for each in self.kinds}
        found = {kind: left.get(kind, 0) - size for kind, size in named.items()} if left else {}
        return {kind: size for kind, size in found.items() if size}

    @property
    def static_bytes(self) -> int:
        """Bytes of parameters, gradients and the optimizer's state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def static_words(self) -> str:
        """What of these there is, for people: ``parameters, gradients and adamw state``."""
        gradients = ["gradients"] * (self.gradient_bytes > 0)
        *others, last = "parameters", *gradients, *[f"{self.optimizer} state"] * (self.optimizer_bytes > 0)
        return f"{', '.join(others)} and {last}" if others else last

    @property
    def reserved_bytes(self) -> int:
        """What the allocator reserves for the peak, which is what a budget is held against."""
        return reserved_bytes(self.peak.size_bytes, self.allocator_margin)

    @property
    def over_bytes(self) -> int:
        """How far that is over the budget; 0 where it is within, or where there is none."""
        return 0 if self.budget_bytes is None else max(0, self.reserved_bytes - self.budget_bytes)

    @property
    def peak_words(self) -> str:
        """The peak for people: what is allocated and, where the allocator has a margin, what it reserves."""
        allocated, reserved = format_bytes(self.peak.size_bytes), format_bytes(self.reserved_bytes)
        if not self.allocator_margin:
            return allocated
        return f"{allocated} allocated, {reserved} reserved with the allocator's margin of {self.allocator_margin:.3g}"
