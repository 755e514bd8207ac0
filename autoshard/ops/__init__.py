"""What is known of operators: one entry for each operator or family, in the file of its family.

To teach autoshard an operator of torch, add a line to its family. For one of your own, call :func:`register_operator`.
"""

from . import drawn, elements, factories, grouped, images, indexing, norms, products, reductions, views  # noqa: F401  (their entries)
from .local import run_local
from .operator import Operator, has, is_contraction, is_free, is_linear, known
from .overwriting import overwrites
from .register import is_registered, register_operator, registered
from .rule import Rule, replicate_rule
from .shrink import Form, carries_lengths, small, widened

__all__ = [
    "Form",
    "Operator",
    "Rule",
    "carries_lengths",
    "has",
    "is_contraction",
    "is_free",
    "is_linear",
    "is_registered",
    "known",
    "overwrites",
    "register_operator",
    "registered",
    "replicate_rule",
    "run_local",
    "small",
    "widened",
]
