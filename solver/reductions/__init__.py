"""Exact rewrites of a problem into a smaller one. The chain of them is a loop over a table."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from ..networks import Assignment
from ..problem import Problem
from .binding_steps import keep_binding_steps
from .budgets import merge_budgets
from .compact import compact_edges
from .consistency import drop_unsupported
from .contraction import contract_functional
from .dominance import drop_dominated
from .duplicates import merge_duplicates
from .elimination import eliminate_chains
from .equal import merge_equal_networks
from .fixed import keep_fixed
from .oversized import drop_oversized
from .parallel import merge_parallel
from .reduction import Contradiction, Reduction, WayBack
from .separable import fold_separable
from .single_strategy import fold_single_strategies
from .ties import merge_ties
from .trim import trim_networks

REDUCTIONS: Final = MappingProxyType[str, Reduction](
    {
        "merge equal networks": merge_equal_networks,
        "merge budgets": merge_budgets,
        "merge ties": merge_ties,
        "keep fixed": keep_fixed,
        "trim networks": trim_networks,
        "compress timeline": keep_binding_steps,
        "drop oversized strategies": drop_oversized,
        "drop unsupported strategies": drop_unsupported,
        "fold single strategies": fold_single_strategies,
        "contract functional edges": contract_functional,
        "merge parallel edges": merge_parallel,
        "compact edge matrices": compact_edges,
        "fold separable matrices": fold_separable,
        "drop dominated strategies": drop_dominated,
        "merge duplicate nodes": merge_duplicates,
        "eliminate chains": eliminate_chains,
    }
)
"""In the order of the chain: budgets, ties and fixed choices come before the others, which assume that there are none;
equal networks before them, as what follows then looks at those of one layer for all that are tied to it."""


PROMPT: Final = frozenset(REDUCTIONS) - {"drop dominated strategies", "eliminate chains"}
"""Reductions of the first round that run even after the deadline: backends rely on the first four, and the others take
about as long as reading the problem did, and leave one for which an answer is found at once."""

PATIENCE: Final = 0.25
"""The rounds end after this part of the time that there is."""

WORTHWHILE: Final = 0.99
"""A further round of the table is worth its time where the last one left at most this part of the size."""


@dataclass(frozen=True)
class Chain:
    """What is left of a problem after the chain, and the way back through it."""

    problem: Problem
    ways_back: tuple[WayBack, ...]

    def lift(self, assignment: Assignment) -> Assignment:
        """The assignment of the original problem, at the same cost."""
        for way_back in reversed(self.ways_back):
            assignment = way_back.lift(assignment)
        return assignment

    def lower(self, assignment: Assignment) -> Assignment:
        """An assignment of the reduced problem near the one of the original problem."""
        for way_back in self.ways_back:
            assignment = way_back.lower(assignment)
        return assignment


def reduce(
    problem: Problem,
    deadline_s: float | None = None,
    on_step: Callable[[str, Problem], None] = lambda name, problem: None,
) -> Chain | Contradiction:
    """Applies the table until a round leaves more than WORTHWHILE of the size, or PATIENCE ends.

    deadline_s: a value of `time.monotonic()`; the PROMPT reductions run once even after it.
    """
    now_s, ways_back = time.monotonic(), list[WayBack]()
    until_s = float("inf") if deadline_s is None else now_s + PATIENCE * (deadline_s - now_s)
    first_round = True
    while True:
        size, applied = _size(problem), len(ways_back)
        for name, reduction in REDUCTIONS.items():
            if time.monotonic() > until_s and not (first_round and name in PROMPT):
                continue
            outcome = reduction(problem)
            if isinstance(outcome, Contradiction):
                return outcome
            if outcome is not None:
                problem = outcome.problem
                ways_back.append(outcome.way_back)
                on_step(name, problem)
        first_round = False
        if len(ways_back) == applied or _size(problem) > WORTHWHILE * size:
            return Chain(problem, tuple(ways_back))


def _size(problem: Problem) -> int:
    return problem.strategies + sum(edge.costs.size for edge in problem.edges) + problem.arcs


__all__ = ["REDUCTIONS", "Chain", "Contradiction", "reduce"]
