"""Large problems: a dual ascent for the bound and first answers, windows solved by HiGHS for better ones.

First the dual is advanced, for PASSES passes or ASCENT_SHARE of the time, and its messages are rounded to assignments
now and then. Assignments for different prices on memory are recombined. Then threads search windows near nodes where
the best answer is far above the bound; HiGHS releases the interpreter lock, so all cores work. (Windows beside the
ascent would slow it down more than they help: its many short numpy calls wait for the lock. Measured on the instance
M of IOPDDL.) A problem that is not large is given to branch and cut on a thread of its own, and the search starts
only if that takes longer than HEAD_START_S.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...problem import Problem
from ..backend import POLL_S, Answer, Request, start_thread
from ..fixing import is_of_networks, run_fixing
from ..lazy import run_lazily
from ..mathopt import MathOpt
from ..tree import run_tree
from .ascent import Ascent, compacted
from .neighbourhoods import Neighbourhoods
from .pairwise import build_pairwise
from .recombination import Recombination
from .shared import Shared

HEAD_START_S = 10.0
HEAD_START_OF_NETWORKS_S = 60.0
"""Where there are networks the bound of the dual is weak and the relaxation of branch and cut mostly integral."""

HEAD_START_SHARE = 0.25
GRACE_S = 2.0


@dataclass(frozen=True)
class Decomposition:
    """Dual ascent and windows.

    Attributes:
        searchers: threads that search windows.
        exact_pairs, exact_arcs: problems with at most so many pairs on their edges and arcs in their networks are also
            given to branch and cut.
    """

    searchers: int = 2
    exact_pairs: int = 0
    exact_arcs: int = 0

    def run(self, problem: Problem, request: Request) -> Answer:
        """See `Backend.run`."""
        if problem.limits_copies:
            return run_tree(problem, request)  # the dual knows nothing of what copies hold
        if self.exact_arcs and is_of_networks(problem):
            answer = run_fixing(problem, request)
            if answer is not None:
                return answer
        problem = compacted(problem)
        # The end of this search is not the end of what the caller asked for.
        shared = Shared(problem, replace(request, stop=threading.Event()))
        if request.start is not None:
            shared.offer_assignment(request.start)
        exact = None
        pairs = sum(edge.costs.size for edge in problem.edges)
        if pairs <= self.exact_pairs and problem.arcs <= self.exact_arcs:
            exact = _thread(shared, partial(_branch_and_cut, problem, shared))
        search = _thread(shared, partial(self._search, problem, shared, exact))
        _wait(shared, request.stop, search, exact)
        shared.stop.set()
        search.join(GRACE_S)
        return shared.answer()

    def _search(self, problem: Problem, shared: Shared, exact: threading.Thread | None) -> None:
        if exact is not None:
            left_s = shared.request.seconds_left()
            head_start_s = HEAD_START_OF_NETWORKS_S if problem.networks else HEAD_START_S
            exact.join(head_start_s if left_s is None else min(head_start_s, HEAD_START_SHARE * left_s))
        if shared.stop.is_set():
            return
        ascent = Ascent(build_pairwise(problem), shared)
        ascent.run()
        if ascent.loads is not None and not shared.stop.is_set():
            Recombination(problem, ascent.dual, ascent.descent, ascent.loads, shared).run(ascent.pass_s)
        if shared.choices is None and not shared.stop.is_set():
            _any_answer(problem, shared)
        threads = [_thread(shared, partial(_improve, ascent, k)) for k in range(self.searchers)]
        for thread in threads:
            thread.join()


def _improve(ascent: Ascent, seed: int) -> None:
    """Searches windows until the shared search stops or is stale."""
    slack = ascent.dual.messages.slack
    neighbourhoods = Neighbourhoods(ascent.problem, ascent.energy, ascent.loads, slack, ascent.shared)
    neighbourhoods.search(np.random.default_rng([ascent.shared.request.seed, seed]))


def _branch_and_cut(problem: Problem, shared: Shared) -> None:
    """HiGHS on the whole problem; whatever it proves ends the search."""
    answer = run_lazily(MathOpt("HIGHS"), problem, replace(shared.request, on_progress=lambda cost, bound: None))
    shared.take(answer)
    if answer.infeasible or answer.choices is not None:
        shared.stop.set()


def _any_answer(problem: Problem, shared: Shared) -> None:
    """The last resort where no rounding was feasible: the first answer of branch and cut on all of the problem."""
    request = replace(shared.request, relative_gap=1e6, on_progress=lambda cost, bound: None)
    answer = run_lazily(MathOpt("HIGHS"), problem, request)
    shared.take(answer)
    if answer.infeasible:
        shared.stop.set()


def _thread(shared: Shared, work: Callable[[], None]) -> threading.Thread:
    """Runs the work on a daemon thread; a failure is raised in the caller's thread when it asks for the answer."""

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            shared.fail(error)

    return start_thread(guarded)


def _wait(shared: Shared, stop: threading.Event, search: threading.Thread, exact: threading.Thread | None) -> None:
    """Returns when all threads ended, the search stopped, the caller wants it to, or the deadline passed."""
    while search.is_alive() or (exact is not None and exact.is_alive()):
        if shared.stop.wait(POLL_S) or stop.is_set() or shared.request.seconds_left() == 0.0:
            return
