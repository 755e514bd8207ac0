"""What people would plan under a budget: the baselines of a mesh, asked where the search finds nothing good.

A scheme leaves few choices, so its program is solved without memory in a second or two, and its plan fits or does not.
The demo Llama on 2x2 under 40% of what it needs freely: 267 ms (``fsdp+sp/full``), where the search of 80 s has 436.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, Self, TypeVar

from solver import Solution

from ..capture import CapturedGraph
from ..constraints import CUT_THE_BATCH, Constraint, gather_constraints
from ..constraints.baselines import Baseline, baselines
from ..errors import ConstraintError
from ..lowering import Results
from ..mesh import Mesh
from ..plans import ShardingPlan
from .budget import NEAR, Found
from .formulation import Formulation, Objective
from .limit import MemoryLimit


class Planning(Protocol):
    """What plans of one model under one budget need of a :class:`~autoshard.planning.planner.Planner`."""

    @property
    def graph(self) -> CapturedGraph:
        """The captured step."""
        ...

    @property
    def mesh(self) -> Mesh:
        """The mesh it is planned for."""
        ...

    @property
    def limit(self) -> MemoryLimit:
        """The budget."""
        ...

    @property
    def objective(self) -> Objective:
        """What is minimised."""
        ...

    @property
    def time_limit_s(self) -> float | None:
        """For the solver."""
        ...

    @property
    def chooses_again(self) -> bool:
        """Whether the program may decide what is computed again."""
        ...

    @property
    def bucket_bytes(self) -> int:
        """How much travels together at most."""
        ...

    @property
    def gathers_ahead(self) -> bool:
        """Whether parameters are gathered before they are read."""
        ...

    @property
    def results(self) -> Results:
        """What operators make, as far as it is known."""
        ...

    def program(self, constraints: Sequence[Constraint]) -> Formulation:
        """The program under constraints."""
        ...

    def solution(self, formulation: Formulation, *, explains: bool) -> Solution:
        """What the solver says of it; why there is no answer is looked for where it ``explains``."""
        ...

    def write(self, formulation: Formulation, solution: Solution) -> ShardingPlan:
        """The plan of a solution."""
        ...

    def having(self, **changes: Any) -> Self:
        """The same with other options."""
        ...


_P = TypeVar("_P", bound=Planning)


def experts(
    planners: Sequence[Planning], constraints: Sequence[Constraint], known_ns: Callable[[], float]
) -> Iterator[Found]:
    """Plans of baselines that may be cheaper than what is known, those that do not fit included: each scheme as it is
    or, where that does not fit, computing layers again, on the first schedule on which that fits.

    Args:
        planners: of one model under one budget, each for a schedule, the fastest first.
        constraints: further ones, which the plans keep; they are the only ones that the plans name.
        known_ns: the cost of the best plan that is known, those given out so far included.
    """
    budget = planners[0].limit.allowed_bytes
    told = [planner.having(chooses_again=False, says_bounds=False) for planner in planners]
    for baseline in reversed(baselines(told[0].mesh)):  # those that hold least first
        if _cuts_several_rows(baseline, told[0]):
            continue  # many choices, and of a batch that can be cut nobody cuts the sequence
        plain = _planned(told[0], baseline, constraints)
        if plain is None or plain.cost_ns >= known_ns():
            continue
        yield plain
        if budget is None or plain.peak_bytes <= budget:
            continue
        selective, full = baseline.recomputing() if planners[0].chooses_again else (baseline, baseline)
        left = told
        while left:
            planner, *left = left
            found = _planned(planner, full, constraints)
            if found is None:
                break
            yield found
            if found.peak_bytes <= budget:
                less = _planned(planner, selective, constraints)
                if less is not None:
                    yield less
                break
            left = _from_where_it_fits(found, left, budget)


def _cuts_several_rows(baseline: Baseline, planner: Planning) -> bool:
    """Whether a baseline cuts the sequence where each rank has several rows."""
    ranks = zip(baseline.schemes, planner.mesh.shape)
    return "cp" in baseline.schemes and planner.graph.batch > math.prod(
        n for scheme, n in ranks if scheme in CUT_THE_BATCH
    )


def _from_where_it_fits(found: Found, planners: list[_P], budget: int) -> list[_P]:
    """The planners from the first on whose schedule a plan would fit; the last one, which holds least, where it would
    nearly do so there, as prices on that schedule are others; else none.
    """

    def peak_bytes(planner: _P) -> int:
        return found.peak_on(planner.bucket_bytes, planner.gathers_ahead)

    if not planners or peak_bytes(planners[-1]) > (1 + NEAR) * budget:
        return []
    while len(planners) > 1 and peak_bytes(planners[0]) > budget:
        planners = planners[1:]
    return planners


def _planned(planner: Planning, baseline: Baseline, constraints: Sequence[Constraint]) -> Found | None:
    """The cheapest plan of a baseline without a budget; None where there is none."""
    try:
        schemes = gather_constraints(baseline.constraints(planner.mesh), planner.mesh).values
        formulation = planner.program([*constraints, *schemes])
    except ConstraintError:
        return None
    solution = planner.solution(formulation, explains=False)
    if solution.choices is None:
        return None
    plan = replace(planner.write(formulation, solution), pins=tuple(each.text for each in constraints))
    return Found(solution, plan, formulation, planner.limit.policy, planner.results)
