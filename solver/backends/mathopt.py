"""OR-Tools MathOpt: HiGHS and SCIP, fed by arrays.

Model and result stay messages: MathOpt's own classes make an object of every variable, which took as long as solving
the relaxations of small models on meshes of three axes.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import numpy as np
from ortools.math_opt import model_parameters_pb2, model_pb2, result_pb2, solution_pb2
from ortools.math_opt.core.python import solver as core
from ortools.math_opt.python import mathopt
from ortools.math_opt.solvers import highs_pb2
from pybind11_abseil.status import StatusNotOk

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

_INFEASIBLE = (
    result_pb2.TERMINATION_REASON_INFEASIBLE,
    result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED,
)


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
        result = self._solved(_proto(program.scaled(), scale), _parameters(program, request), _hint(program, request))
        if result.termination.reason in _INFEASIBLE:
            return ProgramAnswer(infeasible=True)
        dual_bound = result.termination.objective_bounds.dual_bound / scale
        bound = dual_bound if np.isfinite(dual_bound) else None
        found = result.solutions[0].primal_solution if result.solutions else solution_pb2.PrimalSolutionProto()
        if found.feasibility_status != solution_pb2.SOLUTION_STATUS_FEASIBLE:
            return ProgramAnswer(bound=bound)
        x = np.zeros(len(program.costs))
        x[np.array(found.variable_values.ids, np.int64)] = found.variable_values.values
        return ProgramAnswer(x, bound)

    def _solved(
        self,
        model: model_pb2.ModelProto,
        parameters: mathopt.SolveParameters,
        hint: model_parameters_pb2.ModelSolveParametersProto,
    ) -> result_pb2.SolveResultProto:
        """MathOpt's result; without presolve where the solver breaks off with an error of its own.

        HiGHS does where it cannot turn an answer of the presolved program back (transformNewIntegerFeasibleSolution).
        """

        def result() -> result_pb2.SolveResultProto:
            # No interrupter: in OR-Tools 9.15 HiGHS does not heed it, and SCIP prints errors of its own for having one.
            solver = mathopt.SolverType[self.solver].value
            nothing = mathopt.StreamableSolverInitArguments().to_proto(), mathopt.CallbackRegistration().to_proto()
            return core.solve(model, solver, nothing[0], parameters.to_proto(), hint, None, nothing[1], None, None)

        try:
            return result()
        except StatusNotOk:
            parameters.presolve = mathopt.Emphasis.OFF
            return result()


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


def _hint(program: Program, request: Request) -> model_parameters_pb2.ModelSolveParametersProto:
    """The start as values of the choices; the solver completes it."""
    hint = model_parameters_pb2.ModelSolveParametersProto()
    if request.start is not None:
        values = np.zeros(program.choices)
        values[program.first[:-1] + np.array(request.start.choices, np.int64)] = 1.0
        given = hint.solution_hints.add().variable_values
        given.ids.extend(np.arange(program.choices))
        given.values.extend(values)
    return hint


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
