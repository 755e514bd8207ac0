"""The integers that a problem is made of: arrays of int64, the mark of what is forbidden, and the checks of both."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

INFEASIBLE: Final = 10**18
"""The entry of an absent pair in an edge matrix, or of a forbidden strategy in a node's costs.

It is the contest's infinity (IOPDDL), fits int64 and is larger than every finite cost: a finite entry lies strictly
between -INFEASIBLE and INFEASIBLE.
"""


class ProblemError(ValueError):
    """The problem breaks one of its invariants; the text says which, where, and what was found."""


def as_integers(values: npt.ArrayLike, dims: int, what: str) -> IntArray:
    """The values as int64, in an array of so many dimensions.

    what: names the values in an error.

    Raises:
        ProblemError: they are no integers, or have another number of dimensions.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise ProblemError(f"{what} must be integers that fit int64, found {array.dtype}")
    if array.ndim != dims:
        raise ProblemError(f"{what} must have {dims} dimension(s), found shape {array.shape}")
    return array.astype(np.int64, copy=False)


def as_indices(values: npt.ArrayLike, size: int, what: str) -> IntArray:
    """The values as int64 (n,), each in [0, size).

    Raises:
        ProblemError: they are no integers, or one of them is out of range.
    """
    array = as_integers(values, 1, what)
    if array.size and (array.min() < 0 or array.max() >= size):
        wrong = int(array[(array < 0) | (array >= size)][0])
        raise ProblemError(f"{what} must lie in [0, {size}), found {wrong}")
    return array


def as_costs(values: npt.ArrayLike, dims: int, what: str) -> IntArray:
    """The values as int64 costs, INFEASIBLE included.

    Raises:
        ProblemError: they are no integers, or too large to be costs.
    """
    array = as_integers(values, dims, what)
    if array.size and (array.max() > INFEASIBLE or array.min() <= -INFEASIBLE):
        raise ProblemError(f"{what} must lie in (-10^18, 10^18], where 10^18 (INFEASIBLE) means forbidden")
    return array
