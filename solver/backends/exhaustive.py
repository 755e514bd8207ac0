"""Every assignment, judged by the evaluator: the oracle of the tests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from ..evaluate import evaluate
from ..problem import Problem, ProblemError
from .backend import Answer, Request


@dataclass(frozen=True)
class Exhaustive:
    """Tries all assignments of problems that have at most `limit` of them."""

    limit: int = 1_000_000

    def run(self, problem: Problem, request: Request) -> Answer:
        """See `Backend.run`."""
        sizes = [len(node.costs) for node in problem.nodes]
        if prod(sizes) > self.limit:
            raise ProblemError(f"{prod(sizes):.3g} assignments are too many to try all; choose another backend")
        best: tuple[int, tuple[int, ...]] | None = None
        for choices in product(*map(range, sizes)):
            judged = evaluate(problem, choices)
            if judged.feasible and (best is None or judged.cost < best[0]):
                best = (judged.cost, choices)
        return Answer(infeasible=True) if best is None else Answer(best[1], best[0])
