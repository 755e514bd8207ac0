"""From a captured graph to a plan: prices, the integer program, the search within a memory budget, the plan itself."""

from .budget import NothingFitsError
from .comparison import against_experts
from .formulation import OBJECTIVES, Formulation, Objective, formulate
from .held_as import check_same_parameters, held_pins
from .interpretation import interpret
from .limit import MemoryLimit, memory_limit
from .pairs import demand_edges, pair_problem
from .planner import CHECKPOINTING, Checkpointing, Planner, is_proven, profile_of, warn_if_unproven
from .pricing import Prices
from .solving import solve
from .tensor_networks import Demand, TensorNetwork
from .timeline import outcome, timeline_of

__all__ = [
    "CHECKPOINTING",
    "Checkpointing",
    "OBJECTIVES",
    "Demand",
    "Formulation",
    "MemoryLimit",
    "NothingFitsError",
    "Objective",
    "Planner",
    "Prices",
    "TensorNetwork",
    "against_experts",
    "check_same_parameters",
    "demand_edges",
    "formulate",
    "held_pins",
    "interpret",
    "is_proven",
    "memory_limit",
    "outcome",
    "pair_problem",
    "profile_of",
    "solve",
    "timeline_of",
    "warn_if_unproven",
]
