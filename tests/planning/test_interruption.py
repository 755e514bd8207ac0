"""Ctrl-C ends a search over several programs, whichever of them is being solved."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

import autoshard
from autoshard.planning.comparison import compare
from autoshard.review import explain
from solver import Problem
from solver.backends import Answer, Backend, Request, load_backend

from ..models import EXAMPLES
from ..plans_of import profile_of


def plan(**options: object) -> autoshard.ShardingPlan:
    given: dict[str, Any] = {"mesh": "dp=2,tp=2", "hardware": profile_of("slow"), "cache": False} | options
    return autoshard.plan(*EXAMPLES["llama"](), **given)


class Interrupted:
    """The backend ``auto``, but that Ctrl-C is pressed while it solves the problem of a number."""

    def __init__(self, number: int) -> None:
        self.number, self.begun = number, 0

    def load(self, name: str) -> Backend:
        self._backend = load_backend(name)
        return self

    def run(self, problem: Problem, request: Request) -> Answer:
        """As of any backend."""
        self.begun += 1
        if self.begun == self.number:
            os.kill(os.getpid(), signal.SIGINT)
            request.stop.wait(20)
        return self._backend.run(problem, request)


@pytest.mark.parametrize(
    ("search", "number"),
    [
        (plan, 1),
        (lambda: plan(memory=25_000), 2),
        (lambda: plan(memory=25_000), 3),
        (lambda: plan(against="experts"), 2),
        (lambda: plan(mesh="auto", devices=4), 2),
        (lambda: compare(*EXAMPLES["llama"](), mesh="dp=2,tp=2"), 2),
        (lambda: explain(plan(), *EXAMPLES["llama"](), why="output.weight", hardware=profile_of("slow")), 2),
    ],
    ids=["free", "budget", "budget again", "experts", "mesh", "compare", "explain"],
)
def test_ctrl_c_during_a_solve_ends_the_search(
    search: Callable[[], object], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = Interrupted(number)
    monkeypatch.setattr(sys.modules["solver.solve"], "load_backend", interrupted.load)
    with pytest.raises(KeyboardInterrupt):
        search()
    assert interrupted.begun == number
