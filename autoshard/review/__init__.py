"""Questions about a plan that need its model and a solver: is it still good, why is it so, what if it were otherwise."""

from .check import Finding, Review, check

__all__ = ["Finding", "Review", "check"]
