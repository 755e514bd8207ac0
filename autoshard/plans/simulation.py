"""The predicted step of one rank, moment by moment: its schedule, run on one stream of computation and a link per axis.

Operators run one after the other, and so do the collectives of one mesh axis; one over several axes has them all. What
the schedule has set out travels while operators run, and is waited for in the turn it names; any other collective is
waited for where it stands. A redistribution in no bucket runs before the first operator that wants it; a gradient goes
to its parameter's layout as soon as it is made; what leaves the model, at the end of its phase. What the plan defers
runs behind the backward, and the optimizer's step comes last, in one piece. Of several micro-batches one is followed,
with what the step does once.

Prices are the plan's, of collectives and operators that have the machine for themselves: what hides costs nothing here.
So this is how short the step may be if nothing slows down what runs beside it, while ``step_s`` adds all up. Between
them lies what is to be expected (:func:`overlapped_s`), as kernels that send share the device with those that compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ..mesh import TOGETHER
from ..micro_batches import is_summed
from .plan import PHASES, Execution, Phase, Redistribution, ShardingPlan
from .schedule import END, Bucket, Schedule, Turn, schedule

COMPUTE = ""
"""The lane of operators; the others are named as the axes are that a collective runs over (``dp+tp`` for two)."""


@dataclass(frozen=True)
class Span:
    """Something that runs for ``took_ns`` in a lane: an operator, the collective number ``step`` of a redistribution or
    of a bucket, or (None) the optimizer's step.
    """

    lane: str
    phase: Phase | Literal["optimizer"]
    start_ns: int
    took_ns: int
    what: Execution | Redistribution | Bucket | None
    step: int = 0

    @property
    def end_ns(self) -> int:
        """When it is over."""
        return self.start_ns + self.took_ns


@dataclass(frozen=True)
class Simulation:
    """A step as it runs: what starts, in the order in which it is issued."""

    spans: tuple[Span, ...]

    @property
    def step_ns(self) -> int:
        """How long all of it takes; local copies, whose time no plan lists, are not among it."""
        return max((span.end_ns for span in self.spans), default=0)

    @property
    def hidden_ns(self) -> int:
        """How much of what runs does so beside something else: what the step is shorter than its parts together."""
        return sum(span.took_ns for span in self.spans) - self.step_ns


def simulate(plan: ShardingPlan) -> Simulation:
    """Runs the schedule of a plan that knows the order of execution; without one there are collectives alone."""
    return Simulation(tuple(_Run(plan).spans()))


def overlapped_s(plan: ShardingPlan) -> float:
    """Seconds of a step whose schedule hides what it can, where hidden time costs the share ``contention`` of itself.

    No time for communication on a schedule hides but that of buckets, so this is at least computation, the optimizer's
    step, what travels in no bucket, and the share of what does: the price of the objective ``overlapped-step-time``.
    """
    return plan.hiding_s(simulate(plan).hidden_ns / 1e9) if plan.contention < 1 else plan.step_s


class _Run:
    def __init__(self, plan: ShardingPlan) -> None:
        self._plan, self._schedule = plan, schedule(plan)
        self._now = 0
        self._free: dict[str, int] = defaultdict(int)
        self._arrivals: dict[tuple[int, int], int] = {}
        self._late: list[tuple[int, int]] = []  # what is waited for behind the backward

    def spans(self) -> Iterator[Span]:
        """Everything that runs in the step."""
        deferred, left = frozenset(self._plan.deferred), list[Execution]()
        for phase in PHASES:
            run = [entry for entry in self._plan.execution if entry.phase == phase]
            places, turns = _Places(self._plan, self._schedule, phase, run), self._schedule.turns(phase)
            for entry in run:
                yield from self._turns(phase, turns.get(entry.name, ()))
                yield from self._moved(places.before[entry.name])
                if entry.name in deferred:
                    left.append(entry)
                    continue
                yield self._computed(phase, entry.predicted_ns, entry)
                yield from self._moved(places.after[entry.name])
            yield from self._turns(phase, turns.get(END, ()))
            yield from self._moved(places.last)
        self._now = max([self._now, *(self._arrivals[key] for key in self._late)])
        for entry in left:
            yield self._computed("backward", entry.predicted_ns, entry)
        if self._plan.optimizer_s:
            yield self._computed("optimizer", round(self._plan.optimizer_s * 1e9), None)

    def _turns(self, phase: Phase, turns: Sequence[Turn]) -> Iterator[Span]:
        for turn in turns:
            bucket = self._schedule.buckets[turn.bucket]
            if turn.what == "wait":
                if bucket.is_deferred and turn.travel == len(bucket.travels) - 1:
                    self._late.append((turn.bucket, turn.travel))
                else:
                    self._now = max(self._now, self._arrivals[turn.bucket, turn.travel])
                continue
            took_s = sum(member.collectives[turn.travel].predicted_s for member in bucket.members)
            span = self._sent(bucket.travels[turn.travel].axis, phase, took_s, bucket, turn.travel)
            self._arrivals[turn.bucket, turn.travel] = span.end_ns
            yield span

    def _moved(self, entries: Sequence[Redistribution]) -> Iterator[Span]:
        for entry in entries:
            for step, collective in enumerate(entry.collectives):
                span = self._sent(collective.axis, entry.phase, collective.predicted_s, entry, step)
                self._now = span.end_ns
                yield span

    def _sent(self, axis: str, phase: Phase, took_s: float, what: Redistribution | Bucket, step: int) -> Span:
        links = axis.split(TOGETHER)
        span = Span(axis, phase, max(self._now, *(self._free[link] for link in links)), round(took_s * 1e9), what, step)
        self._free.update(dict.fromkeys(links, span.end_ns))
        return span

    def _computed(self, phase: Phase | Literal["optimizer"], took_ns: int, what: Execution | None) -> Span:
        span = Span(COMPUTE, phase, self._now, took_ns, what)
        self._now = span.end_ns
        return span


class _Places:
    """When the redistributions of a phase run that travel with no others: before which operator, after which, or at the
    end of the phase.
    """

    def __init__(self, plan: ShardingPlan, found: Schedule, phase: Phase, run: Sequence[Execution]) -> None:
        self.before: dict[str, list[Redistribution]] = defaultdict(list)
        self.after: dict[str, list[Redistribution]] = defaultdict(list)
        self.last: list[Redistribution] = []
        place = {entry.name: k for k, entry in enumerate(run)}
        parameters = {entry.name for entry in plan.parameters}
        for entry in plan.redistributions:
            if entry.phase != phase or not entry.collectives or entry in found.members:
                continue
            consumers = [name for name in entry.consumers if name in place]
            maker = entry.tensor if entry.tensor in place else entry.tensor.rpartition(":")[0]
            if is_summed(entry.tensor):
                self.last.append(entry)
            elif maker in place and (not entry.consumers or parameters.intersection(entry.consumers)):
                self.after[maker].append(entry)
            elif consumers:
                self.before[min(consumers, key=place.__getitem__)].append(entry)
            else:
                self.last.append(entry)
