"""The answer as a value: status, cost, bound, gap, and the report of how it was found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .networks import Assignment, Routes


class Status(Enum):
    """How a solve ended. The value is the sentence the user reads; `name.lower()` is the word that is printed."""

    OPTIMAL = "Optimal: no assignment costs less, as the bound proves."
    FEASIBLE = "Feasible: a valid assignment that is not proven optimal; more time or a smaller gap may improve it."
    INFEASIBLE = "Infeasible: no assignment satisfies every constraint; relax a budget, a fixed choice or a pair."
    CUT = "Cut: no assignment costs less than the cutoff, as the bound proves."
    TIME_LIMIT = "Time limit: no valid assignment was found in the time given; allow more time or give a start."


@dataclass(frozen=True)
class Size:
    """How large the problem is after `stage`: `pairs` are the entries of edge matrices, `arcs` those of networks."""

    stage: str
    nodes: int
    strategies: int
    edges: int
    pairs: int
    seconds: float
    arcs: int = 0


@dataclass(frozen=True)
class Incumbent:
    """The best cost and bound known `seconds` after the start."""

    seconds: float
    cost: int | None
    bound: int | None


@dataclass(frozen=True)
class SolveReport:
    """How the answer was found. `sizes` starts with the original problem; seconds are wall clock."""

    backend: str
    seconds: float
    sizes: tuple[Size, ...]
    incumbents: tuple[Incumbent, ...]
    explanation: str = ""


@dataclass(frozen=True)
class Mixture:
    """Where a relaxation of a problem stands between two assignments: what most of each node chose, and what is chosen
    where the nodes that are undecided by the same share take what comes second.

    Attributes:
        main, other: the two, with routes; neither need fit a limit.
        share: which part of those nodes is not as in the main one, from 0 to 1.
    """

    main: Assignment
    other: Assignment
    share: float


@dataclass(frozen=True)
class Solution:
    """What `solve` returns.

    Attributes:
        status: see `Status`.
        choices: one strategy index per node of the original problem; None where none was found.
        cost: the evaluator's cost of `choices` and `routes`; None where there are none.
        bound: an integer that no valid assignment costs less than; None where none is known.
        gap: (cost - bound) / |cost|, 0 when they are equal; infinite where either is unknown.
        report: how it was found.
        routes: for each network of the original problem the arcs that it uses in each phase; empty where there are no
            choices.
        mixtures: of problems whose copies hold memory what a relaxation mixes, by share: the first one in which all is
            decided that stands alone; none where all is, or where another way was taken.
    """

    status: Status
    choices: tuple[int, ...] | None
    cost: int | None
    bound: int | None
    gap: float
    report: SolveReport
    routes: tuple[Routes, ...] = ()
    mixtures: tuple[Mixture, ...] = ()


def relative_gap(cost: int | None, bound: int | None) -> float:
    """(cost - bound) / |cost|; 0 when equal, infinite when either is unknown."""
    if cost is None or bound is None:
        return float("inf")
    return 0.0 if cost <= bound else (cost - bound) / max(1, abs(cost))
