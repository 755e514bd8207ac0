"""What is known of operators: one entry for each operator or family, in the file of its family.

To teach autoshard an operator of torch, add a line to its family. For one of your own, call :func:`register_operator`.
"""

from . import (  # noqa: F401  (their entries)
    alignments,
    batch_norm,
    decompositions,
    drawn,
    elements,
    extremes,
    factories,
    grouped,
    images,
    indexing,
    log_softmax,
    lookups,
    masked_rows,
    matrices,
    norms,
    products,
    quantized,
    recurrences,
    reductions,
    spreads,
    views,
)
from .direct import DIRECT
from .into import INTO
from .local import run_local
from .operator import (
    Operator,
    has,
    is_contraction,
    is_free,
    is_left_out,
    is_linear,
    is_part,
    is_statistic,
    known,
    unread,
)
from .overwriting import overwrites
from .parts_of_dims import batches_joined, columns_joined, parts_asked_for, small_in_parts
from .products import is_causal_attention
from .register import is_registered, register_operator, registered
from .rule import Rule, replicate_rule
from .shrink import Form, carries_lengths, small, widened
from .views import are_rows_of

__all__ = [
    "DIRECT",
    "Form",
    "INTO",
    "Operator",
    "Rule",
    "carries_lengths",
    "has",
    "is_causal_attention",
    "is_contraction",
    "is_free",
    "is_left_out",
    "is_linear",
    "is_part",
    "is_registered",
    "is_statistic",
    "known",
    "are_rows_of",
    "batches_joined",
    "columns_joined",
    "parts_asked_for",
    "overwrites",
    "register_operator",
    "registered",
    "replicate_rule",
    "run_local",
    "small",
    "small_in_parts",
    "unread",
    "widened",
]
