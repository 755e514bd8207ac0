"""Strategies: for every operator, the layouts it can run with. DTensor's rules first, each checked numerically."""

from .asked import Asked, asked_by
from .enumerate import Enumerator, Provenance, Rulebook, Source, Strategy
from .signatures import signature

__all__ = ["Asked", "Enumerator", "Provenance", "Rulebook", "Source", "Strategy", "asked_by", "signature"]
