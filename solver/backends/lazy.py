"""Memory rows only where they are violated: solve, look at the timeline, add rows at its local peaks, solve again.

Every round's program is a relaxation of the problem, so its bound is valid for the problem, and a solution that
violates nothing is feasible for the problem. Few rows ever bind, and rows of many steps are nearly equal: two or three
rounds usually suffice. Source: measured on instances of the IOPDDL contest (docs/solver.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ..evaluate import evaluate, usage_at, usage_timeline
from ..networks import Assignment, at_end
from ..problem import Problem
from ..routing import Router
from .backend import Answer, Request
from .bounds import proven_cost
from .circles import cuts
from .decomposition.ascent import repaired
from .holdings import Row
from .integer_program import FloatArray, Program, build

PEAKS_PER_ROUND = 8
PEAKS_OF_COPIES = 2
"""The same where copies hold memory, whose rows say more: with 8 the relaxation of Llama-3-8B on 8x8 under 16 GiB, all
that is computed again decided, took 220 CPU s, with 1 and 3 rows 4 and 6.
"""
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

    Where there are networks the rounds start with the relaxation, all variables continuous: it is integral more often
    than not, and solved in a part of the time.
    When the time ends first, the answer is the best feasible one of a round, else the last one repaired to fit memory.
    """
    rounds = _Rounds(problem, request)
    while True:
        found = solver.minimise(rounds.asked(), replace(request, start=rounds.start))
        if found.x is None:
            if found.infeasible:
                return rounds.infeasible()
            rounds.take(found)
            return rounds.known
        assignment = rounds.take(found)
        circles = cuts(problem, rounds.program, found.x)
        if rounds.done(assignment, circles):
            return rounds.known
        if request.ended():
            known = rounds.known
            if known.choices is not None or rounds.holds:
                return known
            return known.with_assignment(repaired(problem, rounds.program.choices_of(found.x), REPAIR_S))
        request.on_answer(rounds.known)
        request.on_progress(rounds.cost, rounds.known.bound)
        rounds.tighten(assignment, circles)


class _Rounds:
    """The program so far, and the best that is known of the problem."""

    def __init__(self, problem: Problem, request: Request) -> None:
        self.problem = problem
        self.request = request
        self.start = request.start
        self.holds = problem.limits_copies
        self.steps = first_steps(problem)
        if self.holds and self.start is not None:
            self.steps.update(peaks_to_add(problem, self.start, self.steps))
        self.margin = 0
        self.bare = build(problem)
        self.program = self._with_rows()
        self.relaxed = bool(self.program.flows)
        self.known = Answer()
        self.cost: int | None = None
        self._router = Router()

    def asked(self) -> Program:
        """The program of this round."""
        return self.program.relaxed() if self.relaxed else self.program

    def take(self, found: ProgramAnswer) -> Assignment | None:
        """Notes what the round proved and, rounded, chose; the assignment, or None where no routes lead to what it
        wants.
        """
        assignment = None if found.x is None else self._assignment(found.x)
        cost = None if assignment is None else self.know(assignment)
        if self.margin == 0:
            bound = _tighter(self.known.bound, found.bound, cost, self.problem.offset)
            self.known = replace(self.known, bound=bound)
        return assignment

    def know(self, assignment: Assignment) -> int | None:
        """Notes an assignment where it is the best so far; its cost, None for one that is not feasible."""
        judged = evaluate(self.problem, *assignment)
        if not judged.feasible:
            return None
        if self.cost is None or judged.cost < self.cost:
            self.known, self.cost = self.known.with_assignment(assignment), judged.cost
        return judged.cost

    def add_peaks(self, assignment: Assignment) -> bool:
        """Adds rows for the peaks of an answer that have none yet; whether there are such."""
        new = [step for step in peaks_to_add(self.problem, assignment, self.steps) if step not in self.steps]
        if new:
            self.steps.update(new)
            self.program = self._with_rows() if self.margin else self.program.with_usage_rows(self.problem, new)
        return bool(new)

    def infeasible(self) -> Answer:
        """What is known once a program has no answer."""
        return Answer(infeasible=True) if self.margin == 0 else self.known

    def done(self, assignment: Assignment | None, circles: Sequence[Row]) -> bool:
        """Whether the round's answer keeps the limit and, of a relaxation or with circles, is as good as was asked
        for.
        """
        if assignment is not None and peaks_to_add(self.problem, assignment, self.steps):
            return False
        if self.request.is_met(self.cost, self.known.bound):
            return True
        return not self.relaxed and not circles

    def tighten(self, assignment: Assignment | None, circles: Sequence[Row]) -> None:
        """Rows against circles, or for the peaks of the answer; where there are none to add, integers."""
        if circles:
            self.bare, self.program = self.bare.extended(0, circles), self.program.extended(0, circles)
            return
        if assignment is not None and self.add_peaks(assignment):
            return
        if self.relaxed:
            self.relaxed = False
            if self.known.assignment is not None and not self._start_is_better():
                self.start = self.known.assignment
        elif self.holds:
            assert assignment is not None
            assert self.problem.usage_limit is not None
            over = evaluate(self.problem, *assignment).peak_usage - self.problem.usage_limit
            self.margin += max(1, over)
            self.program = self._with_rows()
        else:
            assert assignment is not None
            peaks = peaks_to_add(self.problem, assignment, self.steps)
            self.program = _forbid(self.program, self.problem, assignment.choices, peaks[0])

    def _with_rows(self) -> Program:
        """The program with rows for all steps.

        Where copies hold memory the solver's tolerance may let a row be violated by some bytes; then the rows keep a
        margin, and what they prove is no longer a bound.
        """
        if not self.steps:
            return self.bare
        limit = self.problem.usage_limit
        assert limit is not None
        problem = replace(self.problem, usage_limit=max(0, limit - self.margin)) if self.margin else self.problem
        return self.bare.with_usage_rows(problem, sorted(self.steps))

    def _assignment(self, x: FloatArray) -> Assignment | None:
        """The choices of a point, with the routes that it takes where networks hold memory, else with the cheapest."""
        choices = self.program.choices_of(x)
        return self._router.routed(self.problem, choices, self.program.arcs_of(x), self.program.routes_of(x))

    def _start_is_better(self) -> bool:
        if self.start is None or self.cost is None:
            return False
        judged = evaluate(self.problem, *self.start)
        return judged.feasible and judged.cost <= self.cost


def first_steps(problem: Problem) -> set[int]:
    """All steps where they are few (budgets, tied layers): a round without them would be for nothing."""
    last = max((hi for node in problem.nodes for (_, hi), _ in node.loads), default=0)
    lives = (life for network in problem.networks for life in network.lives)
    last = max([last, *(max(life.made + 1, at_end(life.reads)) for life in lives)])
    return set(range(last)) if problem.usage_limit is not None and last <= PEAKS_PER_ROUND else set()


def peaks_to_add(problem: Problem, assignment: Assignment, steps: set[int]) -> list[int]:
    """The steps of the highest local maxima of the usage timeline that are over the limit, highest first.

    Where the limit is soft: over what the rows of `steps` already pay for.
    """
    if problem.usage_limit is None:
        return []
    timeline = usage_timeline(problem, *assignment)
    allowed = problem.usage_limit
    if problem.usage_price is not None:
        allowed = max([allowed, *(usage_at(timeline, step) for step in steps)])
    usages = [0, *(usage for _, usage in timeline), 0]
    peaks = [
        (-usages[k], step)
        for k, (step, _) in enumerate(timeline, start=1)
        if usages[k] > allowed and usages[k - 1] < usages[k] >= usages[k + 1]
    ]
    return [step for _, step in sorted(peaks)[: PEAKS_OF_COPIES if problem.limits_copies else PEAKS_PER_ROUND]]


def _tighter(bound: int | None, found: float | None, cost: int | None, offset: int) -> int | None:
    if found is None:
        return bound
    rounded = proven_cost(found, cost, offset)
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
