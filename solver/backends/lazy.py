"""Memory rows only where they are violated: solve, look at the timeline, add rows at its local peaks, solve again.

Every round's program is a relaxation of the problem, so its bound is valid for the problem, and a solution that
violates nothing is feasible for the problem. Few rows ever bind, and rows of many steps are nearly equal: two or three
rounds usually suffice. Source: measured on the IOPDDL instances, ../shared/iopddl/README.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..evaluate import evaluate, usage_timeline
from ..problem import Problem
from ..routing import Router
from .backend import Answer, Request
from .bounds import integer_bound
from .decomposition.ascent import repaired
from .program import FloatArray, Program, build

PEAKS_PER_ROUND = 8
REPAIR_S = 2.0


@dataclass(frozen=True, eq=False)
class ProgramAnswer:
    """What an integer-programming solver says of a program: variable values, lower bound, proven infeasibility."""

    x: FloatArray | None = None
    bound: float | None = None
    infeasible: bool = False


class ProgramSolver(Protocol):
    """Solves one program within the request's time and gap."""

    def minimise(self, program: Program, request: Request) -> ProgramAnswer:
        """The best point found, a bound, or proven infeasibility."""
        ...


def run_lazily(solver: ProgramSolver, problem: Problem, request: Request) -> Answer:
    """Answers the problem by rounds of ever more memory rows.

    When the time ends first, the answer is the best feasible one of a round, else the last one repaired to fit memory.
    """
    steps, router = _first_steps(problem), Router()
    program = build(problem)
    program = program.with_usage_rows(problem, steps) if steps else program
    known, cost = Answer(), None
    while True:
        found = solver.minimise(program, request)
        if found.infeasible:
            return Answer(infeasible=True)
        if found.x is None:
            return replace(known, bound=_tighter(known.bound, found.bound, None, problem.offset))
        choices = program.choices_of(found.x)
        assignment = router.routed(problem, choices, program.arcs_of(found.x))
        if assignment is None:  # only reached where a tolerance let something flow from where nothing is made
            return replace(known, bound=_tighter(known.bound, found.bound, None, problem.offset))
        judged = evaluate(problem, *assignment)
        known = replace(known, bound=_tighter(known.bound, found.bound, judged.cost, problem.offset))
        if judged.feasible and (cost is None or judged.cost < cost):
            known, cost = known.with_assignment(assignment), judged.cost
        peaks = _peaks_to_add(problem, choices, steps)
        if not peaks:
            return known
        if request.ended():
            return known if cost is not None else known.with_assignment(repaired(problem, choices, REPAIR_S))
        request.on_answer(known)
        request.on_progress(cost, known.bound)
        new = [step for step in peaks if step not in steps]
        program = program.with_usage_rows(problem, new) if new else _forbid(program, problem, choices, peaks[0])
        steps.update(new)


def _first_steps(problem: Problem) -> set[int]:
    """All steps where they are few (budgets, tied layers): a round without them would be for nothing."""
    last = max((hi for node in problem.nodes for (_, hi), _ in node.loads), default=0)
    return set(range(last)) if problem.usage_limit is not None and last <= PEAKS_PER_ROUND else set()


def _peaks_to_add(problem: Problem, choices: Sequence[int], steps: set[int]) -> list[int]:
    """The steps of the highest local maxima of the usage timeline that are over the limit, highest first.

    Where the limit is soft: over what the rows of `steps` already pay for.
    """
    if problem.usage_limit is None:
        return []
    timeline = usage_timeline(problem, choices)
    allowed = problem.usage_limit
    if problem.usage_price is not None:
        allowed = max([allowed, *(_usage_at(timeline, step) for step in steps)])
    usages = [0, *(usage for _, usage in timeline), 0]
    peaks = [
        (-usages[k], step)
        for k, (step, _) in enumerate(timeline, start=1)
        if usages[k] > allowed and usages[k - 1] < usages[k] >= usages[k + 1]
    ]
    return [step for _, step in sorted(peaks)[:PEAKS_PER_ROUND]]


def _usage_at(timeline: list[tuple[int, int]], step: int) -> int:
    position = bisect_right(timeline, step, key=lambda entry: entry[0])
    return timeline[position - 1][1] if position else 0


def _tighter(bound: int | None, found: float | None, cost: int | None, offset: int) -> int | None:
    if found is None:
        return bound
    rounded = integer_bound(found, None if cost is None else cost - offset) + offset
    return rounded if bound is None else max(bound, rounded)


def _forbid(program: Program, problem: Problem, choices: Sequence[int], step: int) -> Program:
    """The program without the chosen strategies that together are over the limit at the step.

    Only reached when the solver's tolerance lets a memory row be violated by a byte or so: at least one of the
    strategies that use memory at the step must change.
    """
    assert problem.usage_limit is not None
    chosen = [
        int(program.first[index]) + choice
        for index, (node, choice) in enumerate(zip(problem.nodes, choices, strict=True))
        if any(lo <= step < hi and usages[choice] > 0 for (lo, hi), usages in node.loads)
    ]
    return program.with_row(np.array(chosen, np.int64), np.ones(len(chosen)), len(chosen) - 1.0)
