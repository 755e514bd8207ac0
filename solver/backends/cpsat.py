"""OR-Tools CP-SAT: exact in integers, good on small problems and where memory binds hard."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from ..problem import Problem
from .backend import Answer, Request
from .integer_program import Program
from .lazy import ProgramAnswer, run_lazily


@dataclass(frozen=True)
class CpSat:
    """CP-SAT on one worker, so that the answer is deterministic."""

    workers: int = 1

    def run(self, problem: Problem, request: Request) -> Answer:
        """See `Backend.run`."""
        return run_lazily(self, problem, request)

    def minimise(self, program: Program, request: Request) -> ProgramAnswer:
        """See `ProgramSolver.minimise`."""
        model, variables = _model(program)
        if request.start is not None:
            for node, strategy in enumerate(request.start.choices):
                model.add_hint(variables[int(program.first[node]) + strategy], 1)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = self.workers
        solver.parameters.catch_sigint_signal = False  # Ctrl-C is the caller's
        solver.parameters.random_seed = request.seed
        solver.parameters.relative_gap_limit = request.relative_gap
        left_s = request.seconds_left()
        if left_s is not None:
            solver.parameters.max_time_in_seconds = left_s
        with request.stopping(solver.stop_search):
            status = solver.solve(model)
        if status == cp_model.INFEASIBLE:
            return ProgramAnswer(infeasible=True)
        bound = solver.best_objective_bound
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return ProgramAnswer(bound=bound if np.isfinite(bound) else None)
        x = np.array([float(solver.value(variable)) for variable in variables])
        return ProgramAnswer(x, bound)


def _model(program: Program) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    model = cp_model.CpModel()
    variables = [model.new_bool_var("") for _ in range(len(program.costs))]
    costs, values = program.costs.tolist(), program.values.astype(np.int64)
    if program.overflow is not None:
        column, largest = program.overflow
        variables[column] = model.new_int_var(0, largest, "")
        costs[column] //= largest
        values[program.columns == column] //= largest
    model.minimize(cp_model.LinearExpr.weighted_sum(variables, costs))
    starts = np.searchsorted(program.rows, np.arange(len(program.upper) + 1)).tolist()
    for row, (lo, hi) in enumerate(pairwise(starts)):
        terms = [variables[k] for k in program.columns[lo:hi].tolist()]
        total = cp_model.LinearExpr.weighted_sum(terms, values[lo:hi].tolist())
        lower, upper = program.lower[row], program.upper[row]
        model.add(total == int(upper) if lower == upper else total <= int(upper))
    return model, variables
