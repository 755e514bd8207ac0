"""The plan file as pydantic models: which sections and keys there are, and which of them are numbers.

The notations inside the lines (patterns, layouts, strategies) are read by :mod:`autoshard.plans.text.parse`.
``docs/plan_file.md`` explains the same to people, ``docs/plan.schema.json`` to editors
(:mod:`autoshard.plans.text.json_schema`).
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, RootModel, Tag
from pydantic.config import JsonDict

from cost_models.collective_kinds import REDISTRIBUTION_KINDS

from ...mesh import MAX_RANKS
from ...precision import FloatingDtype
from ..expert_distance import MOST_PARTS, MOST_TENSORS, MOST_TEXT, ROLES, Role
from ..memory_outcome import MAX_POINTS, MAX_TENANTS, MemoryPhase, TenantKind
from ..plan import IdenticalLayers
from .notation import MAX_SECONDS

FORMAT_VERSION = 8
MAX_REPEATS = 1_000_000

_LAYOUT = r"^\s*([A-Za-z_]\w*:(R|S\(\d{1,3}(/\d{1,9}(:\d{1,9})*)?\)|P\((sum|max|min)\))(\s+|$))*$"
_COLLECTIVE = rf"^({'|'.join(REDISTRIBUTION_KINDS)}) \w+(\+\w+)* \d+ bytes [\d.]+(E[+-]?\d+)? ms$"

# Scalars are read as text, so that no name turns into a number; to an editor these are none.
_VERSION: JsonDict = {"type": "integer", "const": FORMAT_VERSION}
_BOOLEAN: JsonDict = {"type": "boolean", "enum": [True, False]}

Count = Annotated[int, Field(ge=1, le=1_000_000_000, description="How many entries the line stands for.")]
Size = Annotated[int, Field(ge=0, lt=1 << 63)]
Integer = Annotated[int, Field(gt=-(1 << 63), lt=1 << 63)]
Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Milliseconds = Annotated[
    Decimal,
    Field(ge=0, le=10**12, allow_inf_nan=False, json_schema_extra={"anyOf": [{"type": "number", "minimum": 0}]}),
]
LayoutText = Annotated[
    str,
    Field(
        description="One entry per mesh axis: R whole on every rank, S(d) dim d is cut, S(d/3) each of its three equal "
        "parts is cut, P(sum) ranks hold addends.",
        examples=["dp:S(0) tp:R"],
        json_schema_extra={"pattern": _LAYOUT},
    ),
]
StrategyText = Annotated[
    str,
    Field(
        description="Layouts of the inputs, an arrow, layouts of the results (- is no tensor); x4 counts operators.",
        examples=["dp:S(0) tp:R, dp:R tp:S(1) -> dp:S(0) tp:S(1) x32"],
        json_schema_extra={"pattern": "->"},
    ),
]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class HardwareSection(_Section):
    """The profile the plan was priced with."""

    name: str
    fingerprint: str
    contention: Annotated[
        float,
        Field(ge=0, le=1, description="The share of its time that a collective costs beside computation."),
    ] = 1.0


class PartLine(_Section):
    """A part of the step, and its seconds in the plan and in the best plan of experts."""

    block: Annotated[str, Field(max_length=1000, description="layers.* is all layers; empty: of no module.")]
    role: Role
    ours_s: Seconds
    theirs_s: Seconds


class TensorDifferenceLine(_Section):
    """What the plan and the best plan of experts do with a parameter, an operator or its result."""

    tensor: Annotated[str, Field(max_length=1000)]
    role: Role
    ours_s: Seconds
    theirs_s: Seconds
    ours: Annotated[str, Field(max_length=MOST_TEXT)]
    theirs: Annotated[str, Field(max_length=MOST_TEXT)]


class AgainstSection(_Section):
    """The best plan of experts under the same constraints, and where this one differs."""

    expert: Annotated[str, Field(max_length=100, description="The name of the baseline.")]
    cost_ns: Annotated[Integer, Field(description="What its plan costs by the objective.")]
    compute_s: Seconds
    communication_s: Seconds
    optimizer_s: Seconds
    peak_bytes: Size
    parts: Annotated[
        tuple[PartLine, ...],
        Field(max_length=MOST_PARTS + len(ROLES), description="They add up to the distance, the largest saving first."),
    ] = ()
    tensors: Annotated[
        tuple[TensorDifferenceLine, ...],
        Field(max_length=MOST_TENSORS, description="What differs most in the parts."),
    ] = ()


class ResultSection(_Section):
    """What the solver proved and what the step is predicted to take."""

    status: Annotated[
        Literal["optimal", "feasible"], Field(description="optimal: proved; feasible: stopped before a proof.")
    ]
    identical_layers: Annotated[
        IdenticalLayers,
        Field(description="alike: status and bound are among plans that decide identical layers alike; free: of all."),
    ]
    layer_groups: Annotated[
        tuple[Annotated[str, Field(max_length=1000)], ...],
        Field(max_length=64, description="The groups of layers that are each decided alike; absent where all are."),
    ] = ()
    cost_ns: Integer
    bound_ns: Annotated[Integer, Field(description="No plan under the same constraints costs less.")]
    gap: Annotated[Number, Field(description="(cost - bound) / max(1, |cost|)")]
    compute_s: Seconds
    communication_s: Seconds
    optimizer_s: Annotated[
        Seconds | None, Field(description="The step of the optimizer that memory names; absent where not known.")
    ] = None
    at_peak_s: Annotated[
        Seconds | None,
        Field(description="Products, convolutions and attention of the model at the hardware's peak; for the MFU."),
    ] = None
    against: Annotated[
        AgainstSection | None,
        Field(description="The distance to the best plan of experts; absent where not asked for."),
    ] = None


class TensorLine(_Section):
    """A parameter, buffer, input or output, or several alike."""

    layout: LayoutText
    shape: Annotated[tuple[Size, ...], Field(max_length=64, description="The global shape.")]
    dtype: Annotated[str, Field(examples=["float32", "bfloat16"])]
    count: Count = 1


class OperatorsSection(_Section):
    """One strategy text per operator pattern."""

    forward: dict[str, StrategyText]
    backward: dict[str, StrategyText]


class FollowerLine(_Section):
    """Operators of one module, or of several alike, that take and give the same layouts."""

    module: Annotated[str, Field(max_length=1000)]
    roles: Annotated[tuple[str, ...], Field(min_length=1)]
    strategy: Annotated[str, Field(json_schema_extra={"pattern": "->"})]
    count: Count = 1


class FollowersSection(_Section):
    """Operators that take what their first input has, by phase."""

    forward: tuple[FollowerLine, ...]
    backward: tuple[FollowerLine, ...]


class RedistributionLine(_Section):
    """A redistribution, or several alike."""

    tensor: Annotated[str, Field(max_length=1000)]
    phase: Literal["forward", "backward"]
    path: Annotated[str, Field(examples=["dp:S(0) tp:P(sum) => dp:S(0) tp:R"], json_schema_extra={"pattern": "=>"})]
    collectives: tuple[
        Annotated[
            str, Field(examples=["all_gather dp 262144 bytes 0.0125 ms"], json_schema_extra={"pattern": _COLLECTIVE})
        ],
        ...,
    ]
    consumers: Annotated[
        tuple[Annotated[str, Field(max_length=2000)], ...],
        Field(alias="for", description="Who wants the last layout; layers.* is the layer of the tensor."),
    ] = ()
    kept: Annotated[Literal["true", "false"], Field(json_schema_extra={"type": "boolean", "enum": [True, False]})] = (
        "false"
    )
    shared: Annotated[
        Size | None,
        Field(description="First steps that are those of another line of the tensor; where kept, by default all."),
    ] = None
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


class SavedLine(_Section):
    """What need not be kept since the forward because an operator of every layer is computed again."""

    operator: Annotated[str, Field(max_length=1000)]
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
    allocator_margin: Annotated[
        float,
        Field(ge=0, le=1, description="What the allocator reserves beyond what is in use, as a share of that."),
    ] = 0.0
    soft_ms_per_gib: Number | None = None
    static_bytes: StaticSection
    peak: PointLine
    tenants: Annotated[tuple[TenantLine, ...], Field(max_length=MAX_TENANTS)]
    other_bytes: Size
    timeline: Annotated[
        tuple[Annotated[dict[MemoryPhase, dict[str, Size]], Field(min_length=1, max_length=1)], ...],
        Field(max_length=MAX_POINTS, description="Phase, operator, bytes: in their order, several on a line."),
    ]
    saved: Annotated[tuple[SavedLine, ...], Field(description="What computing operators again saves, most first.")] = ()
    kinds: Annotated[
        dict[TenantKind, Annotated[tuple[Size, ...], Field(min_length=1, max_length=MAX_POINTS)]],
        Field(description="Bytes of each kind at each point of the timeline; one number where they are all the same."),
    ] = Field(default_factory=dict)


def _kind(line: object) -> str:
    """Whether a line of the execution is a loop over layers or the operators of one module."""
    body = next(iter(line.values()), None) if isinstance(line, Mapping) else None
    return "[loop]" if isinstance(body, list | tuple) else "[run]"


class RunLine(RootModel[dict[str, Annotated[dict[str, Milliseconds], Field(min_length=1)]]]):
    """Operators of one module that run one after the other: role and milliseconds."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"minProperties": 1, "maxProperties": 1})


class LoopLine(RootModel[dict[str, Annotated[tuple["ExecutionLine", ...], Field(min_length=1)]]]):
    """What runs once for each of several layers."""

    model_config = ConfigDict(frozen=True, json_schema_extra={"minProperties": 1, "maxProperties": 1})


ExecutionLine = Annotated[Annotated[RunLine, Tag("[run]")] | Annotated[LoopLine, Tag("[loop]")], Discriminator(_kind)]


class ExecutionSection(_Section):
    """The order of execution on one rank: module, roles and milliseconds; loops over layers."""

    forward: tuple[ExecutionLine, ...]
    backward: tuple[ExecutionLine, ...]


class TotalsSection(_Section):
    """Entries after unfolding; the last line of the file, so that a file cut short is noticed."""

    parameters: Size
    buffers: Size
    inputs: Size
    outputs: Size
    operators: Size
    redistributions: Size


class PlanDocument(_Section):
    """A sharding plan of autoshard: which rank holds which part of each tensor, and what is communicated."""

    autoshard_plan: Annotated[Literal["8"], Field(json_schema_extra=_VERSION, description="The format version.")]
    model: str
    fingerprint: str
    call: str
    mesh: Annotated[str, Field(max_length=200, examples=["dp=8,tp=8"], description="Axes and sizes, slowest first.")]
    ranks: Annotated[
        tuple[Size, ...],
        Field(
            max_length=MAX_RANKS, description="The rank at each position; absent where the last axis counts fastest."
        ),
    ] = ()
    network: Annotated[
        dict[str, Annotated[str, Field(max_length=1000)]],
        Field(description="What each mesh axis runs on, in that order of ranks; absent where not known."),
    ] = {}
    hardware: HardwareSection
    objective: str
    pins: tuple[str, ...]
    micro_batches: Annotated[
        int, Field(ge=1, le=MAX_REPEATS, description="How many forwards and backwards make a step.")
    ] = 1
    batch_dim: Annotated[int, Field(ge=0, le=1, description="The dim of the batch in inputs and results.")] = 0
    bucket_bytes: Annotated[
        Size,
        Field(description="How much travels together at most of what is gathered and reduced for parameters; 0: each."),
    ] = 0
    gathers_ahead: Annotated[
        bool, Field(description="Whether parameters are gathered before they are needed, where they travel together.")
    ] = True
    deferred: Annotated[
        tuple[str, ...],
        Field(description="Operators of the forward, and results, that are waited for when the caller reads them."),
    ] = ()
    param_dtype: Annotated[
        FloatingDtype | None, Field(description="What parameters and floating inputs are cast to for the step.")
    ] = None
    reduce_dtype: Annotated[FloatingDtype | None, Field(description="The dtype in which gradients are reduced.")] = None
    result: ResultSection
    repeats: Annotated[
        dict[str, Annotated[int, Field(ge=1, le=MAX_REPEATS)]],
        Field(description="How many numbers * stands for after a path."),
    ]
    memory: MemorySection | None = None
    parameters: dict[str, TensorLine]
    buffers: dict[str, TensorLine]
    inputs: dict[str, TensorLine]
    outputs: dict[str, TensorLine]
    operators: OperatorsSection
    redistributions: tuple[RedistributionLine, ...]
    followers: FollowersSection
    execution: ExecutionSection
    totals: TotalsSection
