"""Large neighbourhood search: picks windows, solves them, and keeps what is better.

Windows grow around one to four nodes, drawn by how far the best answer is above the bound there: several, because
memory couples nodes that no edge joins. The size of the windows varies by SPREAD either way around one that follows
the time that they take.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from ...evaluate import evaluate
from ...networks import Assignment
from ...problem import IntArray, Problem
from ...reductions import Chain, reduce
from ...routing import routed
from ..backend import Answer, Request
from ..lazy import run_lazily
from ..mathopt import MathOpt
from .pairwise import FloatArray, Pairwise
from .prices import Loads
from .shared import Shared
from .windows import Windows

FIRST_STRATEGIES = 500
SPREAD = 3.0
FEWEST_STRATEGIES = 20
AIM_S = 0.5
LIMIT_S = 6.0
WINDOW_GAP = 1e-5
MOST_SEEDS = 4
UNIFORM_SHARE = 0.1
STALE_WINDOWS = 40


class Neighbourhoods:
    """The search of one thread."""

    def __init__(
        self,
        problem: Problem,
        energy: Pairwise,
        loads: Loads | None,
        slack: Callable[[IntArray], FloatArray],
        shared: Shared,
    ) -> None:
        self.problem = problem
        self.energy = energy
        self.loads = loads
        self.slack = slack
        self.shared = shared
        self.windows = Windows(problem)
        self.strategies = FIRST_STRATEGIES
        self._seeded: tuple[tuple[int, ...], FloatArray] | None = None

    def search(self, rng: np.random.Generator) -> None:
        """Tries windows until the search is stopped or, without a deadline, STALE_WINDOWS in a row gained nothing."""
        stale = 0
        while not self.shared.stop.is_set() and self.shared.choices is not None:
            if self.shared.request.deadline_s is None and stale >= STALE_WINDOWS:
                return
            started_s = time.monotonic()
            stale = 0 if self._try_window(self.shared.choices, rng) else stale + 1
            self._resize(time.monotonic() - started_s)

    def _resize(self, took_s: float) -> None:
        factor = 1.15 if took_s < AIM_S / 2 else 0.8 if took_s > 2 * AIM_S else 1.0
        self.strategies = min(self.problem.strategies, max(FEWEST_STRATEGIES, int(self.strategies * factor)))

    def _try_window(self, choices: tuple[int, ...], rng: np.random.Generator) -> bool:
        chosen = np.array(choices, np.int64)[self.energy.order]
        strategies = int(self.strategies * SPREAD ** rng.uniform(-1, 1))
        window = self.windows.grown(self._seeds(choices, chosen, rng), strategies, rng)
        if len(window) == len(choices):
            return self._try_whole()
        usage = np.zeros(0, np.int64) if self.loads is None else self.loads.usage(chosen)
        cut = self.windows.cut(window, list(choices), usage)
        before = routed(cut, [*(choices[node] for node in window), *[0] * (len(cut.nodes) - len(window))])
        local = self._solved(cut, WINDOW_GAP).assignment
        if local is None or (before is not None and evaluate(cut, *local).cost >= evaluate(cut, *before).cost):
            return False
        # On top of what another thread may have found meanwhile; judged as a whole.
        merged = list(self.shared.choices or choices)
        for node, choice in zip(window, local.choices, strict=False):
            merged[node] = choice
        return self.shared.offer(tuple(merged))

    def _try_whole(self) -> bool:
        """A window that holds every node is the problem itself: what is proven of it counts."""
        answer = self._solved(self.problem, self.shared.request.relative_gap)
        before = self.shared.cost
        self.shared.take(answer)
        return self.shared.cost != before

    def _seeds(self, choices: tuple[int, ...], chosen: IntArray, rng: np.random.Generator) -> list[int]:
        if self._seeded is None or self._seeded[0] is not choices:
            slack = np.maximum(0.0, self.slack(chosen))
            share = UNIFORM_SHARE / len(slack) + (1 - UNIFORM_SHARE) * slack / max(1e-12, float(slack.sum()))
            self._seeded = choices, share / share.sum()
        count = min(len(choices), int(rng.integers(1, MOST_SEEDS + 1)))
        picked = rng.choice(len(choices), count, replace=False, p=self._seeded[1])
        seeds: list[int] = self.energy.order[picked].tolist()
        return seeds

    def _solved(self, problem: Problem, gap: float) -> Answer:
        chain = reduce(problem)
        if not isinstance(chain, Chain):
            return Answer()
        if not chain.problem.nodes:
            return Answer(bound=chain.problem.offset).with_assignment(chain.lift(Assignment(())))
        left_s = self.shared.request.seconds_left()
        deadline_s = time.monotonic() + (LIMIT_S if left_s is None else min(LIMIT_S, left_s))
        answer = run_lazily(MathOpt("HIGHS"), chain.problem, Request(deadline_s, gap, self.shared.request.seed))
        found = answer.assignment
        return answer if found is None else answer.with_assignment(chain.lift(found))
