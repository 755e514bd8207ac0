"""Plans as values and as files. Nothing here needs torch or a solver.

:mod:`autoshard.plans.views.show` prints them; it is not imported here, because it needs rich and a training job does
not.
"""

from .memory_outcome import MemoryKind, MemoryOutcome, MemoryPhase, MemoryPoint, MemorySaved, MemoryTenant, TenantKind
from .plan import (
    PHASES,
    Collective,
    CollectiveKind,
    Execution,
    IdenticalLayers,
    OperatorEntry,
    Phase,
    Redistribution,
    ShardingPlan,
    SolverOutcome,
    TensorEntry,
)
from .text.name_patterns import fold_names
from .text.plan_file import check_writable, dump_plan, parse_plan, read_plan, write_plan
from .views.contest import Contender, Contest, Difference, contest_json, first_difference
from .views.summary import CollectiveTotal, PlanSummary, summarize, summary_json

__all__ = [
    "PHASES",
    "Collective",
    "CollectiveKind",
    "CollectiveTotal",
    "Execution",
    "IdenticalLayers",
    "MemoryKind",
    "MemoryOutcome",
    "MemoryPhase",
    "MemoryPoint",
    "MemorySaved",
    "MemoryTenant",
    "Contender",
    "Contest",
    "Difference",
    "OperatorEntry",
    "Phase",
    "PlanSummary",
    "Redistribution",
    "ShardingPlan",
    "SolverOutcome",
    "TenantKind",
    "TensorEntry",
    "check_writable",
    "contest_json",
    "dump_plan",
    "first_difference",
    "fold_names",
    "parse_plan",
    "read_plan",
    "summarize",
    "summary_json",
    "write_plan",
]
