"""What the threads of a search share: the best assignment, the best bound, and the signal to stop."""

from __future__ import annotations

import threading

from ...evaluate import evaluate
from ...problem import Problem
from ..backend import Answer, Request
from ..bounds import integer_bound


class Shared:
    """The best answer so far. All methods may be called from any thread."""

    def __init__(self, problem: Problem, request: Request) -> None:
        self.problem = problem
        self.request = request
        self.stop = request.stop
        self.choices: tuple[int, ...] | None = None
        self.cost: int | None = None
        self._bound: int | None = None
        self._infeasible = False
        self._failure: BaseException | None = None
        self._lock = threading.RLock()

    def offer(self, choices: tuple[int, ...]) -> bool:
        """Takes the assignment if it is feasible and better than the best."""
        judged = evaluate(self.problem, choices)
        with self._lock:
            if not judged.feasible or (self.cost is not None and judged.cost >= self.cost):
                return False
            self.choices, self.cost = choices, judged.cost
            self._improved()
        return True

    def raise_bound(self, found: float) -> None:
        """Takes a lower bound in floating point, lowered by its error already, if it is better than the best."""
        with self._lock:
            self._raise(integer_bound(found, self.cost, error=0.0))

    def take(self, answer: Answer) -> None:
        """Takes what another backend found."""
        with self._lock:
            self._infeasible |= answer.infeasible
            if answer.choices is not None:
                self.offer(answer.choices)
            if answer.bound is not None:
                self._raise(answer.bound)

    def fail(self, error: BaseException) -> None:
        """Notes an error of a thread and stops the search."""
        self._failure = error
        self.stop.set()

    def answer(self) -> Answer:
        """The best answer; raises the error of a thread that failed."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            return Answer(self.choices, self._bound, self._infeasible)

    def _raise(self, bound: int) -> None:
        if self._bound is None or bound > self._bound:
            self._bound = bound
            self._improved()

    def _improved(self) -> None:
        self.request.on_progress(self.cost, self._bound)
        if self.cost is not None and self._bound is not None:
            if self.cost - self._bound <= self.request.relative_gap * abs(self.cost):
                self.stop.set()
