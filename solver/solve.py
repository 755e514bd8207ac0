"""The one door: reduce, run a backend, lift, judge."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from .backends import DEFAULT, Answer, Request, load_backend
from .evaluate import evaluate
from .problem import Problem, ProblemError
from .reductions import Chain, Contradiction, reduce
from .solution import Incumbent, Size, Solution, SolveReport, Status, relative_gap


def solve(
    problem: Problem,
    *,
    backend: str = "auto",
    time_limit_s: float | None = None,
    seed: int = 0,
    relative_gap: float = 0.0,
    start: Sequence[int] | None = None,
    progress: Callable[[Incumbent], None] | None = None,
) -> Solution:
    """Minimises the problem; see `solver.problem` for its objective and constraints.

    The problem is reduced by the exact rewrites of `solver.reductions`, the backend solves what is left, and the answer
    is lifted back and judged by `evaluate` on the problem as given.

    Args:
        backend: a name of `BACKENDS`, or "auto".
        time_limit_s: wall-clock seconds; None for no limit.
        seed: same problem, options and seed, same answer (with a time limit, as far as the clock allows).
        relative_gap: the backend may stop at this (cost - bound) / |cost|; 0 asks for a proven optimum.
        start: a known assignment, such as the previous plan, to start from.
        progress: called whenever the best cost or the bound improves.

    Raises:
        ProblemError: an argument is out of range, or `start` does not fit the problem.
        BackendUnavailable: a package that the backend needs is not installed.
    """
    run = _Run(problem, DEFAULT if backend == "auto" else backend, time_limit_s, progress)
    _check(problem, time_limit_s, relative_gap, start)
    chosen = load_backend(backend)
    run.step("original", problem)
    chain = reduce(problem, run.deadline_s, run.step)
    if isinstance(chain, Contradiction):
        return run.solution(Answer(infeasible=True), None, chain.reason)
    request = Request(
        run.deadline_s, relative_gap, seed, None if start is None else chain.lower(tuple(start)), run.improved
    )
    if not chain.problem.nodes:
        return run.solution(Answer((), chain.problem.offset), chain)
    return run.solution(chosen.run(chain.problem, request), chain)


class _Run:
    """One call of solve: its clock, what it reports, and how it ends."""

    def __init__(
        self,
        problem: Problem,
        backend: str,
        time_limit_s: float | None,
        progress: Callable[[Incumbent], None] | None,
    ) -> None:
        self.problem = problem
        self.backend = backend
        self.started_s = time.monotonic()
        self.deadline_s = None if time_limit_s is None else self.started_s + time_limit_s
        self.progress = progress
        self.sizes: list[Size] = []
        self.incumbents: list[Incumbent] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_s

    def step(self, stage: str, problem: Problem) -> None:
        """Notes the size after a stage."""
        pairs = sum(edge.costs.size for edge in problem.edges)
        size = Size(stage, len(problem.nodes), problem.strategies, len(problem.edges), pairs, self.seconds)
        self.sizes.append(size)

    def improved(self, cost: int | None, bound: int | None) -> None:
        """Notes a better cost or bound."""
        self.incumbents.append(Incumbent(self.seconds, cost, bound))
        if self.progress is not None:
            self.progress(self.incumbents[-1])

    def solution(self, answer: Answer, chain: Chain | None, explanation: str = "") -> Solution:
        """Lifts and judges the answer of the backend."""
        choices, cost, bound = None, None, answer.bound
        if answer.choices is not None:
            assert chain is not None
            choices = chain.lift(answer.choices)
            judged = evaluate(self.problem, choices)
            expected = evaluate(chain.problem, answer.choices)
            assert judged.feasible, f"internal error: the answer is not feasible: {judged.violations[:3]}"
            assert judged.cost == expected.cost, f"internal error: cost {judged.cost}, expected {expected.cost}"
            assert bound is None or bound <= judged.cost, f"internal error: cost {judged.cost} under bound {bound}"
            cost = judged.cost
        self.improved(cost, bound)
        report = SolveReport(self.backend, self.seconds, tuple(self.sizes), tuple(self.incumbents), explanation)
        return Solution(_status(answer, cost), choices, cost, bound, relative_gap(cost, bound), report)


def _status(answer: Answer, cost: int | None) -> Status:
    if answer.infeasible:
        return Status.INFEASIBLE
    if cost is None:
        return Status.TIME_LIMIT
    return Status.OPTIMAL if answer.bound == cost else Status.FEASIBLE


def _check(problem: Problem, time_limit_s: float | None, gap: float, start: Sequence[int] | None) -> None:
    if time_limit_s is not None and not time_limit_s > 0:
        raise ProblemError(f"time_limit_s is {time_limit_s}: expected a positive number of seconds, or None")
    if not 0 <= gap < float("inf"):
        raise ProblemError(f"relative_gap is {gap}: expected a number from 0 up")
    if start is not None:
        try:
            evaluate(problem, start)
        except ProblemError as error:
            raise ProblemError(f"start does not fit the problem: {error}") from None
