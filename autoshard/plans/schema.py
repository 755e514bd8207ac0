"""The plan file as pydantic models: which sections and keys there are, and which of them are numbers.

The notations inside the lines (patterns, layouts, strategies) are read by :mod:`autoshard.plans.parse`.
``docs/plan_file.md`` explains the same to people.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .memory import MAX_POINTS, MAX_TENANTS, MemoryPhase, TenantKind
from .notation import MAX_SECONDS

FORMAT_VERSION = 2
READABLE_VERSIONS = (1, 2)
"""Version 1 has no memory section and no ``kept`` redistributions; what it says reads as it did."""
MAX_REPEATS = 1_000_000

Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
Size = Annotated[int, Field(ge=0, lt=1 << 63)]
Integer = Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HardwareSection(_Section):
    """The profile the plan was priced with."""

    name: str
    fingerprint: str


class ResultSection(_Section):
    """What the solver proved and what the step is predicted to take."""

    status: str
    cost_ns: Integer
    bound_ns: Integer
    gap: Number
    compute_s: Seconds
    communication_s: Seconds


class TensorLine(_Section):
    """A parameter, buffer, input or output, or several alike."""

    layout: str
    shape: Annotated[tuple[Size, ...], Field(max_length=64)]
    dtype: str
    count: Count = 1


class OperatorsSection(_Section):
    """One strategy text per operator pattern."""

    forward: dict[str, str]
    backward: dict[str, str]


class RedistributionLine(_Section):
    """A redistribution, or several alike."""

    tensor: Annotated[str, Field(max_length=1000)]
    phase: Literal["forward", "backward"]
    path: str
    collectives: tuple[str, ...]
    kept: Literal["true", "false"] = "false"
    count: Count = 1


class PointLine(_Section):
    """A moment of the step, and the bytes in use then."""

    phase: MemoryPhase
    operator: Annotated[str, Field(max_length=1000)]
    bytes: Size


class TenantLine(_Section):
    """Tensors alive at the peak."""

    name: Annotated[str, Field(max_length=1000)]
    kind: TenantKind
    count: Count
    bytes: Size


class StaticSection(_Section):
    """Bytes that are held whatever runs."""

    parameters: Size
    gradients: Size
    optimizer: Size
    buffers: Size
    inputs: Size


class MemorySection(_Section):
    """Memory of the rank with the largest shards."""

    optimizer: Annotated[str, Field(max_length=100)]
    budget_bytes: Size | None = None
    soft_ms_per_gib: Number | None = None
    static_bytes: StaticSection
    peak: PointLine
    tenants: Annotated[tuple[TenantLine, ...], Field(max_length=MAX_TENANTS)]
    other_bytes: Size
    timeline: Annotated[tuple[PointLine, ...], Field(max_length=MAX_POINTS)]


class TotalsSection(_Section):
    """Entries after unfolding; the last line of the file, so that a file cut short is noticed."""

    parameters: Size
    buffers: Size
    inputs: Size
    outputs: Size
    operators: Size
    redistributions: Size


class PlanDocument(_Section):
    """A plan file of one of the READABLE_VERSIONS."""

    autoshard_plan: Literal["1", "2"]
    model: str
    fingerprint: str
    call: str
    mesh: Annotated[str, Field(max_length=200)]
    hardware: HardwareSection
    objective: str
    pins: tuple[str, ...]
    result: ResultSection
    memory: MemorySection | None = None
    repeats: dict[str, Annotated[int, Field(ge=1, le=MAX_REPEATS)]]
    parameters: dict[str, TensorLine]
    buffers: dict[str, TensorLine]
    inputs: dict[str, TensorLine]
    outputs: dict[str, TensorLine]
    operators: OperatorsSection
    redistributions: tuple[RedistributionLine, ...]
    totals: TotalsSection
