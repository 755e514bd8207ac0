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
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...problem import IntArray, Problem
from ...reductions.compact import compact_edges
from ...reductions.reduction import Reduced
from ..backend import Answer, Request
from ..lazy import run_lazily
from ..mathopt import MathOpt
from .descent import Descent
from .dual import Dual
from .neighbourhoods import Neighbourhoods
from .pairwise import build_pairwise
from .prices import Loads
from .recombination import Recombination
from .shared import Shared

PASSES = 3000
PASSES_PER_ROUNDING = 25
ASCENT_SHARE = 0.6
HEAD_START_S = 10.0
HEAD_START_SHARE = 0.25
POLL_S = 0.05
GRACE_S = 2.0


@dataclass(frozen=True)
class Decomposition:
    """Dual ascent and windows.

    Attributes:
        searchers: threads that search windows.
        exact_pairs: problems with at most so many pairs on their edges are also given to branch and cut.
    """

    searchers: int = 2
    exact_pairs: int = 0

    def run(self, problem: Problem, request: Request) -> Answer:
        """See `Backend.run`."""
        compact = compact_edges(problem)
        problem = compact.problem if isinstance(compact, Reduced) else problem
        # The end of this search is not the end of what the caller asked for.
        shared = Shared(problem, replace(request, stop=threading.Event()))
        if request.start is not None:
            shared.offer(request.start)
        exact = None
        if sum(edge.costs.size for edge in problem.edges) <= self.exact_pairs:
            exact = _thread(shared, partial(_branch_and_cut, problem, shared))
        search = _thread(shared, partial(self._search, problem, shared, exact))
        _wait(shared, request.stop, search, exact)
        shared.stop.set()
        search.join(GRACE_S)
        return shared.answer()

    def _search(self, problem: Problem, shared: Shared, exact: threading.Thread | None) -> None:
        if exact is not None:
            left_s = shared.request.seconds_left()
            exact.join(HEAD_START_S if left_s is None else min(HEAD_START_S, HEAD_START_SHARE * left_s))
        if shared.stop.is_set():
            return
        search = _Search(problem, shared)
        search.ascend()
        search.recombine()
        if shared.choices is None and not shared.stop.is_set():
            _any_answer(problem, shared)
        threads = [_thread(shared, partial(search.improve, k)) for k in range(self.searchers)]
        for thread in threads:
            thread.join()


class _Search:
    """The dual, the rounding of its messages, and the windows around its answers."""

    def __init__(self, problem: Problem, shared: Shared) -> None:
        self.problem = problem
        self.shared = shared
        self.energy = build_pairwise(problem)
        self.loads = None if problem.usage_limit is None else Loads(problem, self.energy)
        self.dual = Dual(self.energy, self.loads, problem.offset)
        self.descent = Descent(self.energy, self.loads)
        self.pass_s = 0.0

    def ascend(self) -> None:
        """Advances the dual for PASSES passes or its share of the time, until it stalls or proves infeasibility."""
        started_s, left_s = time.monotonic(), self.shared.request.seconds_left()
        progress, next_rounding = 0.0, 1
        while progress < 1 and not self.dual.stalled and not self.shared.stop.is_set():
            self.dual.advance(progress)
            progress = self.dual.passes / PASSES
            if left_s is not None:
                progress = max(progress, (time.monotonic() - started_s) / (ASCENT_SHARE * left_s + 1e-9))
            if self.dual.bound > self.energy.most + self.problem.offset and self.problem.usage_price is None:
                # No assignment costs so much: the prices on memory can rise for ever.
                self.shared.take(Answer(infeasible=True))
                self.shared.stop.set()
            elif self.dual.passes >= next_rounding or progress >= 1 or self.dual.stalled:
                next_rounding = self.dual.passes + min(self.dual.passes, PASSES_PER_ROUNDING)
                self.shared.raise_bound(self.dual.bound)
                self._round()
        self.pass_s = (time.monotonic() - started_s) / max(1, self.dual.passes)

    def recombine(self) -> None:
        """Mixes assignments of different prices on memory, where memory has prices."""
        if self.loads is not None and not self.shared.stop.is_set():
            recombination = Recombination(self.problem, self.dual, self.descent, self.loads, self.shared)
            recombination.run(self.pass_s)

    def improve(self, seed: int) -> None:
        """Searches windows until the shared search stops or is stale."""
        slack = self.dual.messages.slack
        neighbourhoods = Neighbourhoods(self.problem, self.energy, self.loads, slack, self.shared)
        neighbourhoods.search(np.random.default_rng([self.shared.request.seed, seed]))

    def _round(self) -> None:
        """Offers the rounded messages, repaired to fit a hard limit."""
        dual, scale = self.dual, float(self.dual.prices.sum()) + abs(self.dual.bound)
        chosen = self.descent.settled(self.descent.rounded(dual.messages), dual.messages.costs)
        fitting: IntArray | None = chosen
        if self.problem.usage_price is None:
            fitting = self.descent.repaired(chosen, dual.prices, scale)
        if fitting is not None:
            self._offer(fitting)

    def _offer(self, chosen: IntArray) -> None:
        cost = self.shared.cost
        if cost is None or self.descent.cost(chosen) + self.problem.offset < cost:
            choices = np.empty_like(chosen)
            choices[self.energy.order] = chosen
            self.shared.offer(tuple(choices.tolist()))


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

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    return thread


def _wait(shared: Shared, stop: threading.Event, search: threading.Thread, exact: threading.Thread | None) -> None:
    """Returns when all threads ended, the search stopped, the caller wants it to, or the deadline passed."""
    while search.is_alive() or (exact is not None and exact.is_alive()):
        if shared.stop.wait(POLL_S) or stop.is_set() or shared.request.seconds_left() == 0.0:
            return
