"""How much of a step's communication hides behind its computation, and how much the step waits for.

A collective *hides* while an operator runs on the same rank and is *exposed* while none does. Both are read off the
simulated step (:mod:`autoshard.plans.simulation`), so they are what is best: nothing slows down what runs beside it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ..layout import Layout
from .plan import Phase, Redistribution, ShardingPlan
from .schedule import Bucket
from .simulation import COMPUTE, Simulation, Span, simulate


class Computed:
    """How long operators, which run one after the other, have run up to any moment of a step."""

    def __init__(self, spans: Iterable[Span]) -> None:
        found = [span for span in spans if span.lane == COMPUTE and span.took_ns]
        self._starts = [span.start_ns for span in found]
        self._ends = [span.end_ns for span in found]
        self._before = [0, *accumulate(span.took_ns for span in found)]

    def until(self, moment: float) -> float:
        """Nanoseconds of computation before a moment, itself in nanoseconds from the start of the step."""
        started = bisect_right(self._starts, moment)
        return self._before[started] - max(0, self._ends[started - 1] - moment) if started else 0

    def between(self, start: float, end: float) -> float:
        """Nanoseconds of computation in a stretch of the step."""
        return self.until(end) - self.until(start)


@dataclass(frozen=True)
class LinkExposure:
    """What is sent over a link in a step: ``hidden_s`` beside computation, ``exposed_s`` beside none."""

    link: str
    hidden_s: float
    exposed_s: float

    @property
    def sent_s(self) -> float:
        """All of it."""
        return self.hidden_s + self.exposed_s


@dataclass(frozen=True)
class Exposure:
    """The communication of a step of a plan that knows the order of its operators.

    With several micro-batches, of which the simulation follows one, everything counts as often as it runs in a step.
    """

    plan: ShardingPlan
    simulation: Simulation

    @classmethod
    def of(cls, plan: ShardingPlan) -> Exposure:
        """That of a plan, simulated."""
        return cls(plan, simulate(plan))

    @cached_property
    def computed(self) -> Computed:
        """The computation of the simulated step."""
        return Computed(self.simulation.spans)

    @cached_property
    def links(self) -> tuple[LinkExposure, ...]:
        """The links of the plan, in its order, with what is sent over each."""
        sums: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for span, hidden_ns, runs in self._sent():
            sums[span.lane].append((runs * hidden_ns / 1e9, runs * (span.took_ns - hidden_ns) / 1e9))
        return tuple(
            LinkExposure(link, math.fsum(h for h, _ in sums[link]), math.fsum(e for _, e in sums[link]))
            for link in self.plan.links
        )

    @property
    def hidden_s(self) -> float:
        """What hides behind computation."""
        return math.fsum(each.hidden_s for each in self.links)

    @property
    def exposed_s(self) -> float:
        """What does not; links that are exposed at the same time count each."""
        return math.fsum(each.exposed_s for each in self.links)

    @property
    def at_once_s(self) -> float:
        """How much less the step waits than what is exposed, as several links are busy at once."""
        return (self.simulation.hidden_ns / 1e9) - self.hidden_s if self.plan.micro_batches == 1 else 0.0

    @cached_property
    def by_redistribution(self) -> dict[tuple[str, Phase, tuple[Layout, ...]], float]:
        """Exposed seconds of each redistribution, by its tensor, phase and path; of what travels together each has the
        part that it has of the time.
        """
        exposed: dict[tuple[str, Phase, tuple[Layout, ...]], float] = defaultdict(float)
        for span, hidden_ns, runs in self._sent():
            exposed_s = runs * (span.took_ns - hidden_ns) / 1e9
            what = span.what
            members = what.members if isinstance(what, Bucket) else (what,) if isinstance(what, Redistribution) else ()
            times = [member.collectives[span.step].predicted_s for member in members]
            for member, time in zip(members, times):
                share = time / sum(times) if sum(times) else 1 / len(times)
                exposed[member.tensor, member.phase, member.path] += exposed_s * share
        return exposed

    def _sent(self) -> Iterator[tuple[Span, float, int]]:
        """Each collective of the simulated step, how long it hides, and how often it runs."""
        for span in self.simulation.spans:
            if span.lane != COMPUTE:
                runs = self.plan.runs(span.what) if isinstance(span.what, Redistribution) else 1
                yield span, self.computed.between(span.start_ns, span.end_ns), runs
