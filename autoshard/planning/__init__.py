"""From a captured graph to a plan: prices, the integer program, the search within a memory budget, the plan itself."""

from .budget import MemoryLimit, SolverOptions, memory_limit, plan_within_budget
from .formulation import OBJECTIVES, CopyChoice, Demand, Formulation, Objective, formulate
from .interpretation import interpret
from .planner import Planner, profile_of, warn_if_unproven
from .pricing import Prices
from .timeline import outcome, timeline_of

__all__ = [
    "OBJECTIVES",
    "CopyChoice",
    "Demand",
    "Formulation",
    "MemoryLimit",
    "Objective",
    "Planner",
    "Prices",
    "SolverOptions",
    "formulate",
    "interpret",
    "memory_limit",
    "outcome",
    "plan_within_budget",
    "profile_of",
    "timeline_of",
    "warn_if_unproven",
]
