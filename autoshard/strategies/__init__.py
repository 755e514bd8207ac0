"""Strategies: for every operator, the layouts it can run with. DTensor's rules first, each checked numerically."""

from .enumerate import Enumerator, Provenance, Rulebook, Source, Strategy, signature

__all__ = ["Enumerator", "Provenance", "Rulebook", "Source", "Strategy", "signature"]
