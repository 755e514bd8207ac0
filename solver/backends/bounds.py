"""What a floating-point lower bound proves of integers."""

from __future__ import annotations

from math import ceil

RESOLUTION = 1e-9
"""Relative difference below which a bound and the cost of the solver's own answer are taken to be equal."""

ERROR = 1e-10
"""Relative error that a bound of branch and cut may carry, assumed.

Such a bound comes from a linear program whose reduced costs may be wrong by 1e-7 where the largest cost is 2^20
(`mathopt.COST_UNITS`): for 10^4 variables and a bound of ten times the largest cost that is 1e-10 of the bound.
Measured on problems with costs up to 10^13 where HiGHS ended: at most 4e-13.
"""


def integer_bound(bound: float, cost: int | None, error: float = ERROR) -> int:
    """The integer that a floating-point lower bound proves, when every cost is an integer.

    The bound is lowered by its possible error, `error` of its size and at least 1e-6, and rounded up: all that costs
    more than an integer costs at least the next one. So a bound less than one below the cost proves it, as long as the
    error is less than what is missing to one. Where the bound agrees with the cost of the solver's answer within
    RESOLUTION it is that cost: no double-precision solver can tell more.
    """
    if cost is not None and 0 <= cost - bound <= max(1e-6, RESOLUTION * abs(bound)):
        return cost
    return ceil(bound - max(1e-6, error * abs(bound)))


def proven_cost(bound: float, cost: int | None, offset: int) -> int:
    """The cost that a bound of a program, which knows no offset, proves of its problem; `cost` is that of an answer."""
    return integer_bound(bound, None if cost is None else cost - offset) + offset
