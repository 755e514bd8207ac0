"""Amounts of bytes and flops: one number, or an array of them."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Amount: TypeAlias = float | Array


def require_amount(name: str, amount: Amount) -> None:
    """Checks that an amount, or each amount of an array, is finite and not negative.

    Raises:
        ValueError: it is not; the message names the parameter.
    """
    if isinstance(amount, np.ndarray):
        fits = bool(np.all((amount >= 0) & (amount < math.inf)))
    else:
        fits = 0 <= amount < math.inf
    if not fits:
        raise ValueError(f"{name} must be finite and not negative, got {amount!r}")
