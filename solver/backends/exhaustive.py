"""Every assignment, judged by the evaluator: the oracle of the tests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from ..evaluate import evaluate
from ..networks import Assignment
from ..problem import Problem, ProblemError
from ..routing import Router
from .backend import Answer, Request


@dataclass(frozen=True)
class Exhaustive:
    """Tries all choices of problems that have at most `limit` of them, each with its cheapest routes."""

    limit: int = 1_000_000

    def run(self, problem: Problem, request: Request) -> Answer:
        """See `Backend.run`."""
        sizes = [len(node.costs) for node in problem.nodes]
        if problem.limits_copies:
            raise ProblemError(
                "copies hold memory, and only the cheapest routes would be tried; choose another backend"
            )
        if prod(sizes) > self.limit:
            raise ProblemError(f"{prod(sizes):.3g} assignments are too many to try all; choose another backend")
        best: tuple[int, Assignment] | None = None
        router = Router()
        for choices in product(*map(range, sizes)):
            found = router.routed(problem, choices)
            judged = None if found is None else evaluate(problem, *found)
            if found and judged and judged.feasible and (best is None or judged.cost < best[0]):
                best = (judged.cost, found)
        return Answer(infeasible=True) if best is None else Answer(bound=best[0]).with_assignment(best[1])
