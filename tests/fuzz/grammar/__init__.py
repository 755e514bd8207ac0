"""The grammar: what programs are made of. :func:`programs` is the strategy that writes them."""

from .programs import programs

__all__ = ["programs"]
