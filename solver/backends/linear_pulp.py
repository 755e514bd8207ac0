"""PuLP: CBC, which ships with it, and HiGHS where highspy is installed; the independent second opinion."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pulp

from ..problem import Problem
from .backend import Answer, Request
from .integer_program import Program
from .lazy import ProgramAnswer, run_lazily

UNLIMITED_S = 1e7
PATIENCE_S = 2.0
"""What CBC is given to end by itself."""


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
        with TemporaryDirectory() as solver.tmpDir, request.stopping(partial(_end_children, threading.get_native_id())):
            try:
                model.solve(solver)
            except pulp.PulpSolverError:
                if request.stop.is_set():
                    return ProgramAnswer()
                raise
        if model.status == pulp.LpStatusInfeasible:
            return ProgramAnswer(infeasible=True)
        if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            return ProgramAnswer()
        x = np.array([variable.value() or 0.0 for variable in variables])
        proven = model.sol_status == pulp.LpSolutionOptimal and request.relative_gap == 0
        return ProgramAnswer(x, float(program.costs @ x) if proven else None)


def _end_children(thread: int) -> None:
    """CBC is a child process, which ends at SIGINT with its best answer. PuLP does not tell its id, but Linux does."""
    children = Path(f"/proc/self/task/{thread}/children")
    for kind in (signal.SIGINT, signal.SIGKILL):
        for child in children.read_text().split() if children.exists() else ():
            with suppress(ProcessLookupError):
                os.kill(int(child), kind)
        time.sleep(PATIENCE_S)


def _model(program: Program) -> tuple[pulp.LpProblem, list[pulp.LpVariable]]:
    model = pulp.LpProblem("autoshard", pulp.LpMinimize)
    variables = [
        model.add_variable(f"v{index}", 0, 1, pulp.LpInteger if integer else pulp.LpContinuous)
        for index, integer in enumerate(program.integers.tolist())
    ]
    model += pulp.LpAffineExpression((variables[k], int(program.costs[k])) for k in np.flatnonzero(program.costs))
    starts = np.searchsorted(program.rows, np.arange(len(program.upper) + 1)).tolist()
    for row, (lo, hi) in enumerate(pairwise(starts)):
        terms = zip(program.columns[lo:hi].tolist(), program.values[lo:hi].tolist(), strict=True)
        expression = pulp.LpAffineExpression((variables[k], value) for k, value in terms)
        lower, upper = program.lower[row], program.upper[row]
        model += expression == upper if lower == upper else expression <= upper
    return model, variables
