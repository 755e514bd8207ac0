"""From a captured graph to a plan: prices, the integer program, the search within a memory budget, the plan itself."""

from .budget import MemoryLimit, memory_limit
from .formulation import OBJECTIVES, Demand, Formulation, Objective, formulate
from .interpretation import interpret
from .planner import Planner, profile_of, warn_if_unproven
from .pricing import Prices
from .timeline import outcome, timeline_of

__all__ = [
    "OBJECTIVES",
    "Demand",
    "Formulation",
    "MemoryLimit",
    "Objective",
    "Planner",
    "Prices",
    "formulate",
    "interpret",
    "memory_limit",
    "outcome",
    "profile_of",
    "timeline_of",
    "warn_if_unproven",
]
