"""OR-Tools MathOpt: HiGHS and SCIP, fed by arrays."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2

from ..problem import Problem
from .backend import Answer, Request
from .integer_program import Program
from .lazy import ProgramAnswer, run_lazily

COST_UNITS = 2.0**20
"""Costs are scaled so that the largest is at most this, where the solvers' absolute tolerances (1e-6) make sense."""

OF_NETWORKS = highs_pb2.HighsOptionsProto(bool_options={"mip_detect_symmetry": False})
"""Options of HiGHS for programs with flows, where it found no use for the symmetries that it took long to look for:
25 of the 98 s of its root for Llama-3-70B on 8x8 under 74.5 GiB.
"""

_INFEASIBLE = (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED)


@dataclass(frozen=True)
class MathOpt:
    """A MathOpt solver by name, "HIGHS" or "GSCIP"."""

    solver: str

    def run(self, problem: Problem, request: Request) -> Answer:
        """See `Backend.run`."""
        return run_lazily(self, problem, request)

    def minimise(self, program: Program, request: Request) -> ProgramAnswer:
        """See `ProgramSolver.minimise`."""
        scale = min(1.0, COST_UNITS / max(1.0, float(np.abs(program.costs).max(initial=0))))
        model = mathopt.Model.from_model_proto(_proto(program.scaled(), scale))
        hint = _hint(model, program, request)
        result = self._solved(model, _parameters(program, request), hint)
        reason = result.termination.reason
        if reason in _INFEASIBLE:
            return ProgramAnswer(infeasible=True)
        bound = result.dual_bound() / scale
        if not result.has_primal_feasible_solution():
            return ProgramAnswer(bound=bound if np.isfinite(bound) else None)
        values = result.variable_values()
        x = np.zeros(len(program.costs))
        for variable, value in values.items():
            x[variable.id] = value
        return ProgramAnswer(x, bound if np.isfinite(bound) else None)

    def _solved(
        self, model: mathopt.Model, parameters: mathopt.SolveParameters, hint: mathopt.ModelSolveParameters
    ) -> mathopt.SolveResult:
        """MathOpt's result; without presolve where the solver breaks off with an error of its own.

        HiGHS does where it cannot turn an answer of the presolved program back (transformNewIntegerFeasibleSolution).
        OR-Tools 9.15 then raises AttributeError, because the error that it means to translate has no `canonical_code`.
        """
        # No interrupter: in OR-Tools 9.15 HiGHS does not heed it, and SCIP prints errors of its own for having one.
        solver = mathopt.SolverType[self.solver]
        try:
            return mathopt.solve(model, solver, params=parameters, model_params=hint)
        except (AttributeError, RuntimeError):
            parameters.presolve = mathopt.Emphasis.OFF
            return mathopt.solve(model, solver, params=parameters, model_params=hint)


def _parameters(program: Program, request: Request) -> mathopt.SolveParameters:
    left_s = request.seconds_left()
    return mathopt.SolveParameters(
        time_limit=None if left_s is None else datetime.timedelta(seconds=left_s),
        node_limit=request.node_limit,
        relative_gap_tolerance=request.relative_gap,
        absolute_gap_tolerance=0.0,
        random_seed=request.seed,
        highs=OF_NETWORKS if program.flows else highs_pb2.HighsOptionsProto(),
    )


def _hint(model: mathopt.Model, program: Program, request: Request) -> mathopt.ModelSolveParameters:
    """The start as values of the choices; the solver completes it."""
    if request.start is None:
        return mathopt.ModelSolveParameters()
    ones = {int(lo) + choice for lo, choice in zip(program.first[:-1], request.start.choices, strict=True)}
    values = {model.get_variable(k): float(k in ones) for k in range(program.choices)}
    return mathopt.ModelSolveParameters(solution_hints=[mathopt.SolutionHint(variable_values=values)])


def _proto(program: Program, scale: float) -> model_pb2.ModelProto:
    model = model_pb2.ModelProto()
    count, row_count = len(program.costs), len(program.upper)
    variables, rows, matrix = model.variables, model.linear_constraints, model.linear_constraint_matrix
    variables.ids.extend(np.arange(count))
    variables.lower_bounds.extend(np.zeros(count))
    variables.upper_bounds.extend(np.ones(count))
    variables.integers.extend(program.integers)
    rows.ids.extend(np.arange(row_count))
    rows.lower_bounds.extend(program.lower)
    rows.upper_bounds.extend(program.upper)
    priced = np.flatnonzero(program.costs)
    model.objective.linear_coefficients.ids.extend(priced)
    model.objective.linear_coefficients.values.extend(program.costs[priced] * scale)
    matrix.row_ids.extend(program.rows)
    matrix.column_ids.extend(program.columns)
    matrix.coefficients.extend(program.values)
    return model
