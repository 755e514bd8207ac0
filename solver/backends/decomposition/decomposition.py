"""Large problems: a dual ascent for the bound and first answers, windows solved by HiGHS for better ones.

First the dual is advanced, and its messages are rounded to assignments now and then. When it has ended, or has had
ASCENT_SHARE of the time, threads search windows near nodes where the best answer is far above the bound; HiGHS releases
the interpreter lock, so all cores work. (Windows beside the ascent would slow it down more than they help: its many
short numpy calls wait for the lock. Measured on the instance M of IOPDDL.)
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

import numpy as np

from ...evaluate import evaluate
from ...problem import IntArray, Problem
from ...reductions import Chain, reduce
from ..backend import Answer, Request
from ..lazy import integer_bound, run_lazily
from ..mathopt import MathOpt
from .descent import Descent
from .dual import Dual
from .pairwise import build_pairwise
from .prices import Loads
from .windows import Windows

PASSES_PER_ROUNDING = 25
WINDOW_STRATEGIES = 400
WINDOW_LIMIT_S = 4.0
WINDOW_AIM_S = 0.5
STALE_WINDOWS = 60
ASCENT_SHARE = 0.6


@dataclass(frozen=True)
class Decomposition:
    """Dual ascent and windows on `workers` threads."""

    workers: int = 2

    def run(self, problem: Problem, request: Request) -> Answer:
        """See `Backend.run`."""
        return _Search(problem, request).run(self.workers)


class _Search:
    """What the threads share."""

    def __init__(self, problem: Problem, request: Request) -> None:
        self.problem = problem
        self.request = request
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.ascended = threading.Event()
        self.choices: tuple[int, ...] | None = None
        self.cost: int | None = None
        self.bound: int | None = None
        self.stale = 0
        self.energy = build_pairwise(problem)
        self.loads = None if problem.usage_limit is None else Loads(problem, self.energy)
        self.dual = Dual(self.energy, self.loads, problem.offset)
        self.descent = Descent(self.energy, self.loads)
        self.windows = Windows(problem)
        self.failure: BaseException | None = None

    def run(self, workers: int) -> Answer:
        if self.request.start is not None:
            self.offer(self.request.start)
        threads = [
            threading.Thread(target=self._guarded, args=(worker,), daemon=True) for worker in range(max(1, workers))
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                threads[0].join(0.05)
                if self.request.seconds_left() == 0.0:
                    self.stop.set()
                    break
        except KeyboardInterrupt:
            self.stop.set()
            if self.choices is None:
                raise
        if self.failure is not None:
            raise self.failure
        if self.choices is None and not self.stop.is_set():
            return self._any_answer()
        with self.lock:
            return Answer(self.choices, self.bound)

    def offer(self, choices: tuple[int, ...]) -> bool:
        """Takes the assignment if it is feasible and better than the best."""
        judged = evaluate(self.problem, choices)
        with self.lock:
            if not judged.feasible or (self.cost is not None and judged.cost >= self.cost):
                return False
            self.choices, self.cost = choices, judged.cost
            self._improved()
        return True

    def raise_bound(self, found: float) -> None:
        """Takes the lower bound if it is better than the best."""
        with self.lock:
            bound = integer_bound(found, self.cost)
            if self.bound is None or bound > self.bound:
                self.bound = bound
                self._improved()

    def _improved(self) -> None:
        self.request.on_progress(self.cost, self.bound)
        if self.cost is not None and self.bound is not None:
            if self.cost - self.bound <= self.request.relative_gap * abs(self.cost):
                self.stop.set()

    def _guarded(self, worker: int) -> None:
        try:
            if worker == 0:
                self._ascend()
            self._search_windows(np.random.default_rng([self.request.seed, worker]))
        except BaseException as error:  # handed to the caller's thread
            self.failure = error
            self.stop.set()

    def _ascend(self) -> None:
        left_s = self.request.seconds_left()
        until_s = None if left_s is None else time.monotonic() + ASCENT_SHARE * left_s
        while not self.dual.ended and not self.stop.is_set() and (until_s is None or time.monotonic() < until_s):
            self.dual.advance()
            if self.dual.passes % PASSES_PER_ROUNDING == 0:
                self.raise_bound(self.dual.bound)
                self._round()
        self.raise_bound(self.dual.bound)
        self._round()
        self.ascended.set()

    def _round(self) -> None:
        dual = self.dual
        costs = dual.messages.costs
        chosen = self.descent.settled(self.descent.rounded(dual.messages), costs)
        repaired = self.descent.repaired(chosen, dual.prices, float(dual.prices.sum()) + abs(dual.bound))
        if repaired is None:
            return
        if self.cost is None or self.descent.cost(repaired) + self.problem.offset < self.cost:
            self.offer(self._in_problem_order(repaired))

    def _in_problem_order(self, chosen: IntArray) -> tuple[int, ...]:
        choices = np.empty_like(chosen)
        choices[self.energy.order] = chosen
        return tuple(choices.tolist())

    def _search_windows(self, rng: np.random.Generator) -> None:
        self.ascended.wait()
        strategies = WINDOW_STRATEGIES
        while not self.stop.is_set() and self.choices is not None:
            started_s = time.monotonic()
            better = self._try_window(strategies, rng)
            took_s = time.monotonic() - started_s
            strategies = int(strategies * (1.1 if took_s < WINDOW_AIM_S else 0.8 if took_s > WINDOW_LIMIT_S / 2 else 1))
            self.stale = 0 if better else self.stale + 1
            if self.request.deadline_s is None and self.dual.ended and self.stale > STALE_WINDOWS:
                return

    def _try_window(self, strategies: int, rng: np.random.Generator) -> bool:
        choices = self.choices
        assert choices is not None
        chosen = np.array(choices, np.int64)[self.energy.order]
        slack = np.maximum(0.0, self.dual.messages.slack(chosen))
        weights = slack / max(1e-12, slack.sum()) + 0.1 / len(slack)
        count = min(len(slack), int(rng.integers(1, 5)))
        picked = rng.choice(len(slack), count, replace=False, p=weights / weights.sum())
        window = self.windows.grown(self.energy.order[picked].tolist(), strategies, rng)
        usage = np.zeros(0, np.int64) if self.loads is None else self.loads.usage(chosen)
        cut = self.windows.cut(window, list(choices), usage)
        before = evaluate(cut, [*(choices[node] for node in window), *[0] * (len(cut.nodes) - len(window))]).cost
        chain = reduce(cut)
        if not isinstance(chain, Chain):
            return False
        left_s = self.request.seconds_left()
        limit_s = WINDOW_LIMIT_S if left_s is None else min(WINDOW_LIMIT_S, left_s)
        request = Request(time.monotonic() + limit_s, 1e-5, self.request.seed)
        answer = run_lazily(MathOpt("HIGHS"), chain.problem, request) if chain.problem.nodes else Answer(())
        if answer.choices is None:
            return False
        local = chain.lift(answer.choices)
        if evaluate(cut, local).cost >= before:
            return False
        merged = list(choices)
        for node, choice in zip(window, local, strict=False):
            merged[node] = choice
        return self._merge(choices, merged, window)

    def _merge(self, before: tuple[int, ...], after: list[int], window: list[int]) -> bool:
        """Offers the change; on top of the other thread's, if that one was faster."""
        current = self.choices
        assert current is not None
        if current is not before:
            rebased = list(current)
            for node in window:
                rebased[node] = after[node]
            after = rebased
        return self.offer(tuple(after))

    def _any_answer(self) -> Answer:
        """The last resort, when no rounding was feasible: the first answer of branch and cut on all of the problem."""
        answer = run_lazily(MathOpt("HIGHS"), self.problem, replace(self.request, relative_gap=1e6))
        return replace(answer, bound=self.bound)
