"""What the user decides: as values and text, in files, in the notation of `mark_sharding`, as schemes for whole axes.

What is exported here needs no torch. :mod:`autoshard.constraints.compile`, which holds constraints against a captured
graph, and what it is made of do and are imported by name.
"""

from .file import Constraints, Given, gather_constraints
from .values import (
    CUT_OF_INPUTS,
    CUT_THE_BATCH,
    Alike,
    AxisScheme,
    CollectiveRule,
    Constraint,
    Exclusion,
    Pin,
    PlacementRule,
    Recomputation,
    Recompute,
    Scheme,
    StrategyPin,
    check_constraints_match,
    check_specs_fit,
    nearest_name,
    parse_constraint,
    parse_pin,
    patterns_of,
)

__all__ = [
    "CUT_OF_INPUTS",
    "CUT_THE_BATCH",
    "Alike",
    "AxisScheme",
    "CollectiveRule",
    "Constraint",
    "Constraints",
    "Exclusion",
    "Given",
    "Pin",
    "PlacementRule",
    "Recomputation",
    "Recompute",
    "Scheme",
    "StrategyPin",
    "check_constraints_match",
    "check_specs_fit",
    "gather_constraints",
    "nearest_name",
    "parse_constraint",
    "parse_pin",
    "patterns_of",
]
