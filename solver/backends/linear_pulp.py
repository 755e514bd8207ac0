"""PuLP: CBC, which ships with it, and HiGHS where highspy is installed; the independent second opinion."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pulp

from ..problem import Problem
from .backend import Answer, Request
from .lazy import ProgramAnswer, run_lazily
from .program import Program

UNLIMITED_S = 1e7


@dataclass(frozen=True)
class Pulp:
    """A PuLP solver by name, "PULP_CBC_CMD" or "HiGHS"."""

    solver: str

    def run(self, problem: Problem, request: Request) -> Answer:
        """See `Backend.run`."""
        return run_lazily(self, problem, request)

    def minimise(self, program: Program, request: Request) -> ProgramAnswer:
        """See `ProgramSolver.minimise`."""
        left_s = request.seconds_left()
        if left_s is not None and left_s <= 0:
            return ProgramAnswer()
        model, variables = _model(program.scaled())
        solver = pulp.getSolver(self.solver, msg=False, timeLimit=left_s or UNLIMITED_S, gapRel=request.relative_gap)
        model.solve(solver)
        if model.status == pulp.LpStatusInfeasible:
            return ProgramAnswer(infeasible=True)
        if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return ProgramAnswer()
        x = np.array([variable.value() or 0.0 for variable in variables])
        proven = model.sol_status == pulp.LpSolutionOptimal and request.relative_gap == 0
        return ProgramAnswer(x, float(program.costs @ x) if proven else None)


def _model(program: Program) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    model = pulp.LpProblem("autoshard", pulp.LpMinimize)
    variables = [
        model.add_variable(f"v{index}", 0, 1, pulp.LpInteger if index < program.choices else pulp.LpContinuous)
        for index in range(len(program.costs))
    ]
    model += pulp.LpAffineExpression((variables[k], int(program.costs[k])) for k in np.flatnonzero(program.costs))
    starts = np.searchsorted(program.rows, np.arange(len(program.upper) + 1)).tolist()
    for row, (lo, hi) in enumerate(pairwise(starts)):
        terms = zip(program.columns[lo:hi].tolist(), program.values[lo:hi].tolist(), strict=True)
        expression = pulp.LpAffineExpression((variables[k], value) for k, value in terms)
        lower, upper = program.lower[row], program.upper[row]
        model += expression == upper if lower == upper else expression <= upper
    return model, variables
