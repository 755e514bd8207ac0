"""The one error of this package."""

from __future__ import annotations


class ProfileError(ValueError):
    """A hardware profile that cannot be found, read or trusted, or that does not fit what is asked of it."""
