"""Questions about a plan that need its model and a solver: is it still good, why so, what if otherwise?"""

from .check import Finding, Review, check
from .edits import Edit
from .explain import Explanation, explain
from .replan import Replanned, replan

__all__ = ["Edit", "Explanation", "Finding", "Replanned", "Review", "check", "explain", "replan"]
