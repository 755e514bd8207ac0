"""Chooses one strategy per node of a graph at least cost: the torch-free solver of autoshard.

problem = Problem(nodes=(Node("a", costs_a), Node("b", costs_b)), edges=(Edge.dense(0, 1, costs_ab),))
solution = solve(problem, time_limit_s=60)
solution.status, solution.choices, solution.cost, solution.bound
"""

from __future__ import annotations

from .backends import BACKENDS, BackendUnavailable
from .backends.priced import fullest
from .evaluate import Evaluation, evaluate, usage_at, usage_timeline
from .lean import leaner
from .least_usage import is_out_of_reach
from .networks import NOWHERE, Assignment, Base, Consumer, Life, Network, Routes
from .problem import INFEASIBLE, Budget, Edge, Group, Load, Node, Problem, ProblemError
from .routing import routed
from .solution import Incumbent, Mixture, Size, Solution, SolveReport, Status
from .solve import solve

__all__ = [
    "BACKENDS",
    "INFEASIBLE",
    "NOWHERE",
    "Assignment",
    "Base",
    "BackendUnavailable",
    "Budget",
    "Consumer",
    "Edge",
    "Evaluation",
    "Group",
    "Incumbent",
    "Life",
    "Load",
    "Mixture",
    "Network",
    "Node",
    "Problem",
    "ProblemError",
    "Routes",
    "Size",
    "Solution",
    "SolveReport",
    "Status",
    "evaluate",
    "fullest",
    "is_out_of_reach",
    "leaner",
    "routed",
    "solve",
    "usage_at",
    "usage_timeline",
]
