"""What the threads of a search share: the best assignment, the best bound, and the signal to stop."""

from __future__ import annotations

import threading

from ...evaluate import evaluate
from ...networks import Assignment
from ...problem import Problem
from ...routing import Router
from ..backend import Answer, Request
from ..bounds import integer_bound


class Shared:
    """The best answer so far. All methods may be called from any thread."""

    def __init__(self, problem: Problem, request: Request) -> None:
        self.problem = problem
        self.request = request
        self.stop = request.stop
        self.best: Assignment | None = None
        self.cost: int | None = None
        self._bound: int | None = None
        self._infeasible = False
        self._failure: BaseException | None = None
        self._lock = threading.RLock()
        self._router = Router()

    @property
    def choices(self) -> tuple[int, ...] | None:
        """Those of the best assignment."""
        best = self.best
        return None if best is None else best.choices

    def offer(self, choices: tuple[int, ...]) -> bool:
        """Takes the choices, with cheapest routes, if they are feasible and better than the best."""
        found = self._router.routed(self.problem, choices)
        return found is not None and self.offer_assignment(found)

    def offer_assignment(self, found: Assignment) -> bool:
        """Takes the assignment if it is feasible and better than the best."""
        judged = evaluate(self.problem, *found)
        with self._lock:
            if not judged.feasible or (self.cost is not None and judged.cost >= self.cost):
                return False
            self.best, self.cost = found, judged.cost
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
            if answer.assignment is not None:
                self.offer_assignment(answer.assignment)
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
            return Answer(None, self._bound, self._infeasible).with_assignment(self.best)

    def _raise(self, bound: int) -> None:
        if self._bound is None or bound > self._bound:
            self._bound = bound
            self._improved()

    def _improved(self) -> None:
        self.request.on_progress(self.cost, self._bound)
        if self.request.is_met(self.cost, self._bound):
            self.stop.set()
