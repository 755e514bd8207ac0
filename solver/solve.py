"""`solve`: reduces the problem, runs a backend on what is left, translates the answer back, and judges it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from .backends import Answer, Backend, Request, load_backend
from .backends.backend import POLL_S, start_thread
from .backends.bounds import RESOLUTION
from .backends.decomposition.ascent import first_answer
from .components import solve_parts
from .cost_units import cost_unit, in_units
from .evaluate import Evaluation, evaluate
from .infeasibility import explain_infeasibility
from .least_usage import is_out_of_reach
from .networks import Assignment
from .problem import Problem, ProblemError
from .reductions import Chain, Contradiction, reduce
from .routing import routed
from .solution import Incumbent, Size, Solution, SolveReport, Status
from .solution import relative_gap as gap_of
from .usages import exact_usages

GRACE_S = 3.0
LEAVING_S = 1.0
FIRST_ANSWER_S = 10.0
EXPLAIN_S = 10.0
FOREVER_S = 1e9
LARGEST_SEED = 2**31 - 1


def solve(
    problem: Problem,
    *,
    backend: str = "auto",
    time_limit_s: float | None = None,
    seed: int = 0,
    relative_gap: float = 0.0,
    node_limit: int | None = None,
    explains: bool = True,
    start: Sequence[int] | Assignment | None = None,
    cutoff: int | None = None,
    answers_interrupt: bool = True,
    progress: Callable[[Incumbent], None] | None = None,
) -> Solution:
    """Minimises the problem; see `solver.problem` for its objective and constraints.

    The problem is reduced by the exact rewrites of `solver.reductions`, the backend solves what is left, and the answer
    is lifted back and judged by `evaluate` on the problem as given. Ctrl-C ends the search like a time limit.
    If nothing was found by then, up to FIRST_ANSWER_S more seconds go into a first answer.

        problem = Problem((Node("a", costs_a), Node("b", costs_b)), (Edge.dense(0, 1, costs_ab),))
        solution = solve(problem, time_limit_s=60)
        print(solution.status.value, solution.cost, solution.bound)

    Args:
        backend: a name of `BACKENDS`. "auto" runs branch and cut where the problem is small after reduction, a
            decomposition where it is large or branch and cut takes long, and a tree of relaxations where copies hold
            memory.
        time_limit_s: wall-clock seconds; None, or FOREVER_S and more, for no limit.
        seed: from 0 below 2^31; same problem, options and seed, same answer, as far as no clock and no second thread
            interferes.
        relative_gap: the backend may stop at this (cost - bound) / |cost|; 0 asks for a proven optimum.
        node_limit: HiGHS and SCIP stop branch and cut after so many nodes, and "auto" and "decomposition" the tree of a
            problem whose copies hold memory after so many relaxations: an end that depends on no clock.
        explains: whether up to EXPLAIN_S go into why an infeasible problem is.
        start: a known assignment, such as the previous plan: one choice per node, or an `Assignment` with routes too;
            choices alone are given cheapest routes. The answer is never worse than a feasible start.
        cutoff: only answers that cost less are of interest: "auto" ends a problem of networks alone once its bound is
            no less, with the status CUT where it has no answer.
        answers_interrupt: whether Ctrl-C ends the search like a time limit; else it is raised at once, as whoever
            solves several problems wants it, who would go on with the next one.
        progress: called, from any thread, whenever the best cost or the bound improves.

    Raises:
        ProblemError: an argument is out of range, `start` does not fit the problem, or usages are too large to be added
            exactly (see `solver.usages`).
        KeyboardInterrupt: Ctrl-C, where that is to have no answer.
        BackendUnavailable: a package that the backend needs is not installed.
    """
    _check(time_limit_s, seed, relative_gap, node_limit)
    known = None if start is None else _checked_start(problem, start)
    chosen, exact = load_backend(backend), exact_usages(problem)
    unit = cost_unit(problem)
    deadline_s = None if time_limit_s is None or time_limit_s >= FOREVER_S else time.monotonic() + time_limit_s
    least = None if cutoff is None else -(-cutoff // unit)
    request = Request(
        deadline_s, relative_gap, seed, known, node_limit=node_limit, cutoff=least, answers_interrupt=answers_interrupt
    )
    run = _Run(problem, unit, backend, progress, explains, cutoff)
    run.step("original", problem)
    try:
        answer, explanation = _answer(in_units(exact, unit), chosen, request, run)
    except KeyboardInterrupt:
        request.interrupt()
        answer, explanation = Answer(), "interrupted"
    return run.solution(answer, request.start, explanation)


def _answer(problem: Problem, backend: Backend, request: Request, run: _Run) -> tuple[Answer, str]:
    """The answer for the problem before reduction, and an explanation where it is infeasible."""
    chain = _reduced(problem, request, run)
    if isinstance(chain, Contradiction):
        return Answer(infeasible=True), _explained(run, backend, request, chain.reason)
    if not chain.problem.nodes:
        return _settled(chain), ""
    if is_out_of_reach(chain.problem):
        return Answer(infeasible=True), _explained(run, backend, request, "")
    lowered = None if request.start is None else chain.lower(request.start)
    inner = replace(request, start=lowered, on_progress=run.improved)
    answer = solve_parts(partial(_answered, backend), chain.problem, inner)
    if answer.infeasible:
        return answer, _explained(run, backend, request, "")
    return _with_mixtures(_lifted(answer, chain, problem, run.judged), chain), ""


def _reduced(problem: Problem, request: Request, run: _Run) -> Chain | Contradiction:
    """The reduced problem; after Ctrl-C no more reduced than it must be."""
    try:
        return reduce(problem, request.deadline_s, run.step)
    except KeyboardInterrupt:
        request.interrupt()
        return reduce(problem, time.monotonic())


def _settled(chain: Chain) -> Answer:
    """The answer where the reductions left nothing to choose."""
    return Answer(bound=chain.problem.offset).with_assignment(chain.lift(Assignment(())))


def _answered(backend: Backend, problem: Problem, request: Request) -> Answer:
    """The backend's answer or, where it found none in time, the start or the first assignment that comes to hand."""
    answer = _stoppable(backend, problem, request)
    if answer.choices is not None or answer.infeasible:
        return answer
    if request.start is not None and evaluate(problem, *request.start).feasible:
        return answer.with_assignment(request.start)
    if problem.limits_copies or request.cuts(answer.bound):  # of the first the ascent knows nothing
        return answer
    first = first_answer(problem, FIRST_ANSWER_S)
    bounds = [bound for bound in (answer.bound, first.bound) if bound is not None]
    return replace(first, bound=max(bounds, default=None))


def _judged(problem: Problem, assignment: Assignment) -> Evaluation:
    return evaluate(problem, *assignment)


def _lifted(
    answer: Answer,
    chain: Chain,
    problem: Problem,
    judged_by: Callable[[Problem, Assignment], Evaluation] = _judged,
) -> Answer:
    """The answer in terms of the problem before the chain; asserts that both cost the same."""
    if answer.assignment is None:
        return answer
    lifted = chain.lift(answer.assignment)
    judged, expected = judged_by(problem, lifted), evaluate(chain.problem, *answer.assignment)
    assert judged.feasible, f"internal error: the answer is not feasible: {judged.violations[:3]}"
    assert judged.cost == expected.cost, f"internal error: the cost is {judged.cost}, expected {expected.cost}"
    return answer.with_assignment(lifted)


def _with_mixtures(answer: Answer, chain: Chain) -> Answer:
    """The answer with what the relaxation mixes in terms of the problem before the chain."""
    lifted = (replace(each, main=chain.lift(each.main), other=chain.lift(each.other)) for each in answer.mixtures)
    return replace(answer, mixtures=tuple(lifted))


def _stoppable(backend: Backend, problem: Problem, request: Request) -> Answer:
    """Runs the backend on a thread, since one that runs native code could not see Ctrl-C or may overrun its time."""
    if request.ended():
        return Answer()
    answers = [Answer()]  # what is known so far, the last is the best
    failures: list[BaseException] = []
    stop, done = threading.Event(), threading.Event()
    own = replace(request, stop=stop, on_answer=answers.append)

    def work() -> None:
        try:
            answers.append(backend.run(problem, own))
        except BaseException as error:
            failures.append(error)
        finally:
            done.set()

    start_thread(work)
    try:
        _wait(done, request)
    except KeyboardInterrupt:
        stop.set()
        done.wait(LEAVING_S)  # for a process that the backend has started, which ends with it
        raise
    stop.set()
    _wait(done, replace(request, deadline_s=time.monotonic() + GRACE_S, stop=threading.Event()))
    if failures:
        raise failures[0]
    return answers[-1]


def _wait(done: threading.Event, request: Request) -> None:
    """Waits, but no longer than asked; Ctrl-C is noted. (Thread.join takes a thread for ended if it is interrupted.)"""
    try:
        while not request.ended() and not done.wait(POLL_S):
            pass
    except KeyboardInterrupt:
        request.interrupt()


def _explained(run: _Run, backend: Backend, request: Request, reason: str) -> str:
    if not run.explains:
        return reason
    left_s = request.seconds_left()
    until_s = time.monotonic() + (EXPLAIN_S if left_s is None else min(EXPLAIN_S, left_s))
    own = Request(until_s, stop=request.stop, answers_interrupt=request.answers_interrupt)
    minimise = partial(_minimised, backend, own)
    try:
        return "; ".join(text for text in (reason, explain_infeasibility(run.problem, minimise)) if text)
    except ProblemError:  # numbers that are too large for the problem of the least peak or budget
        return reason


def _minimised(backend: Backend, request: Request, problem: Problem) -> Answer:
    problem = exact_usages(problem)
    chain = reduce(problem, request.deadline_s)
    if isinstance(chain, Contradiction):
        return Answer(infeasible=True)
    if not chain.problem.nodes:
        return _settled(chain)
    return _lifted(_stoppable(backend, chain.problem, request), chain, problem)


class _Run:
    """The state of one call of `solve`: when it started, what it reported so far, and the unit its costs are in."""

    def __init__(
        self,
        problem: Problem,
        unit: int,
        backend: str,
        progress: Callable[[Incumbent], None] | None,
        explains: bool,
        cutoff: int | None,
    ) -> None:
        self.problem = problem
        self.cutoff = cutoff
        self.unit = unit
        self.backend = backend
        self.progress = progress
        self.explains = explains
        self.started_s = time.monotonic()
        self.sizes: list[Size] = []
        self.incumbents: list[Incumbent] = []
        self._known: dict[tuple[int, Assignment], Evaluation] = {}

    def judged(self, problem: Problem, assignment: Assignment) -> Evaluation:
        """What an assignment costs of a problem that lives as long as the call, worked out once."""
        key = id(problem), assignment
        if key not in self._known:
            self._known[key] = evaluate(problem, *assignment)
        return self._known[key]

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started_s

    def step(self, stage: str, problem: Problem) -> None:
        """Notes the size after a stage."""
        pairs = sum(edge.costs.size for edge in problem.edges)
        counts = len(problem.nodes), problem.strategies, len(problem.edges), pairs
        self.sizes.append(Size(stage, *counts, self.seconds, problem.arcs))

    def improved(self, cost: int | None, bound: int | None) -> None:
        """Notes a better cost or bound, given in units."""
        cost, bound = (None if value is None else value * self.unit for value in (cost, bound))
        self._note(Incumbent(self.seconds, cost, bound))

    def solution(self, answer: Answer, start: Assignment | None, explanation: str) -> Solution:
        """The better of the answer and the start, judged on the problem as given."""
        judged = {found: self.judged(self.problem, found) for found in (answer.assignment, start) if found is not None}
        feasible = [found for found, of in judged.items() if of.feasible]
        best = min(feasible, key=lambda found: judged[found].cost, default=None)
        cost = None if best is None else judged[best].cost
        choices, routes = (None, ()) if best is None else best
        bound = None if answer.bound is None else answer.bound * self.unit
        if cost is not None and bound is not None and cost < bound <= cost + RESOLUTION * abs(cost):
            bound = cost  # a bound of double precision says no more
        assert cost is None or bound is None or bound <= cost, f"internal error: cost {cost} under bound {bound}"
        self._note(Incumbent(self.seconds, cost, bound))
        report = SolveReport(self.backend, self.seconds, tuple(self.sizes), tuple(self.incumbents), explanation)
        status, gap = self._status(answer, cost, bound), gap_of(cost, bound)
        return Solution(status, choices, cost, bound, gap, report, routes, answer.mixtures)

    def _status(self, answer: Answer, cost: int | None, bound: int | None) -> Status:
        if cost is not None:
            return Status.OPTIMAL if bound == cost else Status.FEASIBLE
        if answer.infeasible:
            return Status.INFEASIBLE
        is_cut = self.cutoff is not None and bound is not None and bound >= self.cutoff
        return Status.CUT if is_cut else Status.TIME_LIMIT

    def _note(self, incumbent: Incumbent) -> None:
        self.incumbents.append(incumbent)
        if self.progress is not None:
            self.progress(incumbent)


def _check(time_limit_s: float | None, seed: int, gap: float, node_limit: int | None) -> None:
    if node_limit is not None and node_limit < 1:
        raise ProblemError(f"node_limit is {node_limit}: expected a number from 1 up, or None")
    if time_limit_s is not None and not time_limit_s > 0:
        raise ProblemError(f"time_limit_s is {time_limit_s}: expected a positive number of seconds, or None")
    if not 0 <= seed <= LARGEST_SEED:
        raise ProblemError(f"seed is {seed}: expected a number from 0 to {LARGEST_SEED}")
    if not 0 <= gap < float("inf"):
        raise ProblemError(f"relative_gap is {gap}: expected a number from 0 up")


def _checked_start(problem: Problem, start: Sequence[int] | Assignment) -> Assignment | None:
    """The start with routes; None where no routes lead to what it chooses."""
    try:
        if isinstance(start, Assignment):
            evaluate(problem, *start)
            return start
        evaluate(replace(problem, networks=()), start)
        return routed(problem, start)
    except ProblemError as error:
        raise ProblemError(f"start does not fit the problem: {error}") from None
