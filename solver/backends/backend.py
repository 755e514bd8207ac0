"""What every backend takes, gives and can do: `Request`, `Answer` and `Backend`."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from ..networks import Assignment, Routes
from ..problem import Problem
from ..solution import Mixture

POLL_S = 0.05
EXIT_S = 60.0
THREAD_NAME = "solver"


class BackendUnavailable(ImportError):
    """The package that a backend needs is not installed; the text says which and how to install it."""


@dataclass(frozen=True)
class Answer:
    """What a backend found.

    Attributes:
        choices: its best feasible assignment, if any.
        bound: an integer that no feasible assignment costs less than, if known.
        infeasible: it proved that there is no feasible assignment.
        routes: beside the choices, the arcs that each network uses.
        mixtures: what a relaxation mixes, where it is known.
    """

    choices: tuple[int, ...] | None = None
    bound: int | None = None
    infeasible: bool = False
    routes: tuple[Routes, ...] = ()
    mixtures: tuple[Mixture, ...] = ()

    @property
    def assignment(self) -> Assignment | None:
        """Choices and routes together."""
        return None if self.choices is None else Assignment(self.choices, self.routes)

    def with_assignment(self, found: Assignment | None) -> Answer:
        """The same answer with other choices and routes, or with none."""
        return replace(self, choices=found and found.choices, routes=found.routes if found else ())


@dataclass(frozen=True)
class Request:
    """What is asked of a backend beside the problem.

    Attributes:
        deadline_s: value of `time.monotonic()` after which it must stop; None for none.
        relative_gap: it may stop once (cost - bound) / |cost| is at most this.
        seed: same problem, request and seed, same answer.
        start: a known assignment to start from; it need not be feasible.
        stop: set when the answer is wanted at once (Ctrl-C).
        on_progress: called with (cost or None, bound or None) when either improves.
        on_answer: called with what is known so far by backends that may be in native code when `stop` is set.
        node_limit: it may stop once it has searched so many nodes of a tree; None for none. Backends that search no
            tree, or do not tell, do not heed it.
        cutoff: it may stop once the bound is no less: only answers that cost less are of interest. None for none.
        answers_interrupt: whether an answer is wanted after Ctrl-C; else that is an exception, as anywhere.
    """

    deadline_s: float | None = None
    relative_gap: float = 0.0
    seed: int = 0
    start: Assignment | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    on_progress: Callable[[int | None, int | None], None] = lambda cost, bound: None
    on_answer: Callable[[Answer], None] = lambda answer: None
    node_limit: int | None = None
    cutoff: int | None = None
    answers_interrupt: bool = True

    def interrupt(self) -> None:
        """Notes Ctrl-C.

        Raises:
            KeyboardInterrupt: no answer is wanted.
        """
        self.stop.set()
        if not self.answers_interrupt:
            raise KeyboardInterrupt

    def seconds_left(self) -> float | None:
        """Seconds until the deadline, never negative; None where there is none."""
        return None if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())

    def ended(self) -> bool:
        """Whether the answer is wanted now: the deadline has passed or `stop` is set."""
        return self.stop.is_set() or self.seconds_left() == 0.0

    def cuts(self, bound: int | None) -> bool:
        """Whether a bound proves that no answer is of interest."""
        return self.cutoff is not None and bound is not None and bound >= self.cutoff

    def is_met(self, cost: int | None, bound: int | None) -> bool:
        """Whether an answer of this cost is proven as good as was asked for."""
        return cost is not None and bound is not None and cost - bound <= self.relative_gap * abs(cost)

    @contextmanager
    def stopping(self, interrupt: Callable[[], None]) -> Iterator[None]:
        """While it lasts, `interrupt` is called, from another thread, once `stop` is set."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(POLL_S):
                if self.stop.is_set():
                    return interrupt()

        start_thread(watch)
        try:
            yield
        finally:
            over.set()


def start_thread(work: Callable[[], None]) -> threading.Thread:
    """Runs the work on a daemon thread, for which the end of the interpreter waits up to EXIT_S seconds.

    Native code that knows no interruption may still run when the answer is given, and an interpreter that ends around
    it aborts.
    """
    thread = threading.Thread(target=work, name=THREAD_NAME, daemon=True)
    thread.start()
    return thread


@atexit.register
def _wait_for_threads() -> None:
    until_s = time.monotonic() + EXIT_S
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(max(0.0, until_s - time.monotonic()))


class Backend(Protocol):
    """Solves problems. An implementation is a frozen dataclass whose fields are its options."""

    def run(self, problem: Problem, request: Request) -> Answer:
        """Minimises a problem without ties and fixed choices (the reductions have resolved them)."""
        ...
