"""What a floating-point lower bound proves of integers."""

from __future__ import annotations

import numpy as np

RESOLUTION = 1e-9
"""Relative error that a double-precision solver's bound may carry."""


def integer_bound(bound: float, cost: int | None) -> int:
    """The integer that a floating-point lower bound proves, when every cost is an integer.

    The bound is lowered by its possible error, RESOLUTION * |bound|, and rounded up. Where the solver's bound and the
    cost of its solution agree within that error the bound is the cost: no double-precision solver can tell more.
    """
    error = max(1e-6, RESOLUTION * abs(bound))
    if cost is not None and 0 <= cost - bound <= error:
        return cost
    return int(np.ceil(bound - error))
