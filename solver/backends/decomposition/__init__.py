"""Lower bounds and answers for problems that are too large for branch and cut."""

from __future__ import annotations

from .decomposition import Decomposition

__all__ = ["Decomposition"]
