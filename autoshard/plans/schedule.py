"""When redistributions set out, what travels together, and when it is waited for.

A plan says what is moved from which layout to which. This says how, for three kinds of redistributions that nobody
reads in between:

- Parameters, or what they are cast to for the step, are gathered a *window* ahead. A window is what one layer of a
  phase reads first, ``bucket_bytes`` at most; its gathers set out as the window before it is first read (casts stand
  before all, so that they are made by then), and are waited for at the first reader of their own. Of gathers over
  several axes that is the last one; each before it sets out a window earlier. Where a plan
  does not gather ahead, which holds less, a window sets out where its first tensor is read.
- Gradients are reduced in buckets of ``bucket_bytes`` at most, in the order in which they are made. A bucket sets out
  once its last gradient is made. It is waited for when another sets out with which more than twice ``bucket_bytes``
  would be on their way, or behind the last operator (before the first one that casts what was reduced to the dtypes of
  parameters): a full bucket travels while the next one fills and sets out, and what is in flight is bounded. Where a
  plan does not gather ahead, it is waited for when the next one sets out. Where one does, products write the gradients
  that are all-reduced into the buffer of their bucket, which is there from the first of them on; else it is made as it
  sets out.
- Activations and their gradients set out as soon as they are made, each alone, and are waited for at their first
  reader, where operators that take time stand between. They set out no earlier than at twice the time that they take
  before that reader, and ``MOST_EARLY`` are on their way at most. Of several collectives the longest travels; those
  before it run where it sets out, those behind it where it arrives. Where a plan does not gather ahead, none does.

- What only ``deferred`` operators and results want sets out as soon as it is made, each alone, too, and is waited for
  where they run: a loss, when the caller reads it.

Any other redistribution stands where it is first read.

What travels together takes the same steps over the same axes in the same dtype: one collective for each of the steps.
All of that follows from the plan, so every rank has the same order, which no rank leaves. Nothing here needs torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from cost_models.collective_kinds import RedistributionKind as CollectiveKind

from ..errors import InputError
from ..layout import Layout
from ..precision import cast_name, reduced_name
from .plan import PHASES, Phase, Redistribution, ShardingPlan
from .units import parse_bytes

BUCKET = "25MiB"
"""The default of ``bucket_cap_mb`` in torch's DistributedDataParallel, which found it by measuring
(https://docs.pytorch.org/docs/2.13/generated/torch.nn.parallel.DistributedDataParallel.html).
"""

BUCKET_BYTES = parse_bytes(BUCKET)

LEAN_BUCKETS_BYTES = (parse_bytes("4MiB"), parse_bytes("1MiB"))
"""Of plans for which there is little memory. The last is torch's own first bucket, the smallest that it makes
(``torch.distributed._DEFAULT_FIRST_BUCKET_BYTES``).
"""


def bucket_size(given: str | int) -> int:
    """Bytes of a bucket, as a user gives them: ``"25MiB"``, or a number.

    Raises:
        InputError: it is no size from 0 up.
    """
    try:
        size = parse_bytes(given) if isinstance(given, str) else given
    except ValueError as error:
        raise InputError(f"the bucket: {error}") from None
    if size < 0:
        raise InputError(f"a bucket of {given} bytes cannot be; give a size from 0 up, for example 25MiB")
    return size


END = "results"
"""The place behind the last operator of a phase, where it gives its results; operators' names have a slash."""

MOST_IN_FLIGHT = 2
"""How many full buckets of gradients may be on their way."""

MOST_EARLY = 2
"""How many activations and gradients of them may be on their way."""
EARLIEST = 2
"""How many times as long as they take they may be."""

GATHERS = frozenset({"all_gather"})
REDUCTIONS = frozenset({"all_reduce", "reduce_scatter"})


@dataclass(frozen=True)
class Travel:
    """One collective of a bucket: ``size_bytes`` is the larger of a rank's input and output buffer.

    ``sets_out`` and ``arrives`` are the operators of the phase in whose turn, before they run, it is issued and waited
    for; END where that is behind the last one.
    """

    kind: CollectiveKind
    axis: str
    size_bytes: int
    sets_out: str
    arrives: str


@dataclass(frozen=True)
class Bucket:
    """Redistributions of one phase that travel together, and their collectives, one after the other.

    One that ``is_early`` has an activation, or a gradient of one, and no other. What ``is_deferred`` arrives where the
    operators and results run that the plan defers.
    """

    phase: Phase
    members: tuple[Redistribution, ...]
    travels: tuple[Travel, ...]
    is_early: bool = False
    is_deferred: bool = False

    @property
    def key(self) -> tuple[str, Phase, tuple[Layout, ...]]:
        """What tells it from others of its schedule, and is the same in that of a step with fewer layers that has its
        first redistribution.
        """
        first = self.members[0]
        return first.tensor, first.phase, first.path


@dataclass(frozen=True)
class Turn:
    """What is done in the turn of an operator: the collective number ``travel`` of a bucket is issued or waited for."""

    bucket: int
    travel: int
    what: Literal["issue", "wait"]


@dataclass(frozen=True)
class Schedule:
    """The buckets of a plan, those that set out first coming first."""

    buckets: tuple[Bucket, ...] = ()

    @cached_property
    def members(self) -> frozenset[Redistribution]:
        """All redistributions that travel with others, or ahead."""
        return frozenset(member for bucket in self.buckets for member in bucket.members)

    def turns(self, phase: Phase) -> Mapping[str, tuple[Turn, ...]]:
        """What is done before an operator of a phase runs (or behind the last one), in order."""
        found: dict[str, list[Turn]] = defaultdict(list)
        for k, bucket in enumerate(self.buckets):
            if bucket.phase == phase:
                for i, travel in enumerate(bucket.travels):
                    found[travel.sets_out].append(Turn(k, i, "issue"))
                    found[travel.arrives].append(Turn(k, i, "wait"))
        return {operator: tuple(turns) for operator, turns in found.items()}


@dataclass(frozen=True)
class Sent:
    """A collective as it runs: ``size_bytes`` is the larger of a rank's input and output buffer."""

    phase: Phase
    kind: CollectiveKind
    axis: str
    size_bytes: int


def sent(plan: ShardingPlan) -> Iterator[Sent]:
    """Every collective that one rank runs in a step: those of buckets, and those of redistributions in none."""
    found = schedule(plan)
    for entry in plan.redistributions:
        for each in entry.collectives if entry not in found.members else ():
            yield from [Sent(entry.phase, each.kind, each.axis, each.size_bytes)] * plan.runs(entry)
    for bucket in found.buckets:
        for travel in bucket.travels:
            yield Sent(bucket.phase, travel.kind, travel.axis, travel.size_bytes)


def schedule(plan: ShardingPlan, left_out: Collection[str] = (), unwanted: Collection[str] = ()) -> Schedule:
    """The schedule of a plan; nothing for one without ``bucket_bytes``, or with several micro-batches.

    Args:
        left_out: operators of the backward that do not run, where only some results receive a gradient.
        unwanted: parameters that receive none then.
    """
    if not plan.bucket_bytes or plan.micro_batches > 1:
        return Schedule()
    reader = _Reader(plan, frozenset(left_out), frozenset(unwanted))
    buckets = [*reader.gathered("forward"), *reader.gathered("backward"), *reader.reduced()]
    if plan.gathers_ahead:
        buckets += reader.deferred()
        taken = frozenset(member for bucket in buckets for member in bucket.members)
        buckets += [bucket for phase in PHASES for bucket in reader.early(phase, taken)]
    order = {phase: reader.order(phase) for phase in PHASES}
    return Schedule(tuple(sorted(buckets, key=lambda b: (b.phase != "forward", order[b.phase][b.travels[0].sets_out]))))


def moves_alone(plan: ShardingPlan, entry: Redistribution) -> bool:
    """Whether a redistribution communicates, and no other one of its tensor has to do with its steps."""
    others = (other for other in plan.redistributions if other.tensor == entry.tensor)
    return _is_alone(entry, others)


@dataclass(frozen=True)
class _Found:
    """A redistribution that may travel with others, and the operator at which it is first read, or that makes it."""

    entry: Redistribution
    dtype: str
    place: int

    @property
    def way(self) -> tuple[object, ...]:
        """What it shares with those that it may travel with."""
        changed = ((a, b) for before, after in zip(self.entry.path, self.entry.path[1:]) for a, b in zip(before, after))
        reductions = tuple(a.reduce for a, b in changed if a != b and a.kind == "P")
        return self.dtype, tuple((c.kind, c.axis) for c in self.entry.collectives), reductions


class _Reader:
    def __init__(self, plan: ShardingPlan, left_out: frozenset[str], unwanted: frozenset[str]) -> None:
        self._plan, self._unwanted = plan, unwanted
        own = {entry.name: entry.dtype for entry in plan.parameters}
        to, reduced_in = plan.precision.param_dtype, plan.precision.reduce_dtype
        casts = {cast_name(name): to for name in own} if to else {}
        reduced = {reduced_name(name): name for name in own} if reduced_in else {}
        self._gathered = own | casts
        # who takes gradients: parameters, or the casts to their dtypes, with the parameter and the dtype that they take
        self._takers = {name: (name, dtype) for name, dtype in own.items()}
        self._takers |= {taker: (name, reduced_in) for taker, name in reduced.items() if reduced_in}
        self._names = {phase: [e.name for e in plan.execution if e.phase == phase] for phase in PHASES}
        self._places = {phase: {name: k for k, name in enumerate(self._names[phase])} for phase in PHASES}
        self._runs = {
            phase: {name for name in self._names[phase] if phase == "forward" or name not in left_out}
            for phase in PHASES
        }
        self._over = next((name for name in self._names["backward"] if name in reduced), END)
        self._of_tensor: dict[str, list[Redistribution]] = defaultdict(list)
        for entry in plan.redistributions:
            self._of_tensor[entry.tensor].append(entry)

    def order(self, phase: Phase) -> Mapping[str, int]:
        """The places of a phase in their order."""
        return {**self._places[phase], END: len(self._names[phase])}

    def gathered(self, phase: Phase) -> Iterator[Bucket]:
        """The buckets in which a phase gathers parameters."""
        found = sorted(self._gathers(phase), key=lambda each: each.place)
        windows = list(self._windows(found, phase))
        starts = [window[0].place for window in windows]
        for k, window in enumerate(windows):
            for bucket in _alike(window):
                yield self._gathering(phase, bucket, starts[:k])

    def _gathers(self, phase: Phase) -> Iterator[_Found]:
        for entry in self._plan.redistributions:
            dtype = self._gathered.get(entry.tensor)
            if entry.phase != phase or dtype is None or not self._travels(entry, dtype, GATHERS):
                continue
            readers = [self._places[phase][name] for name in entry.consumers if name in self._runs[phase]]
            if readers and all(name in self._places[phase] for name in entry.consumers):
                yield _Found(entry, dtype, min(readers))

    def _windows(self, found: Sequence[_Found], phase: Phase) -> Iterator[list[_Found]]:
        def layer(each: _Found) -> str:
            return layer_of(self._names[phase][each.place])

        window: list[_Found] = []
        for each in found:
            is_other = window and layer(each) != layer(window[0])
            if window and (is_other or _size(window) + _size([each]) > self._plan.bucket_bytes):
                yield window
                window = []
            window.append(each)
        if window:
            yield window

    def _gathering(self, phase: Phase, bucket: Sequence[_Found], starts: Sequence[int]) -> Bucket:
        """The last step sets out a window ahead of where the bucket is first read, each other one a window before. Not
        ahead, all of them set out there.

        Args:
            starts: of the windows before; earlier than the first of them is the beginning of the phase.
        """
        steps, read = len(bucket[0].entry.collectives), min(each.place for each in bucket)
        if self._plan.gathers_ahead:
            made = {self._places[phase].get(each.entry.tensor, -1) + 1 for each in bucket}
            ahead = [max(place, *made) for place in [*[0] * steps, *starts][-steps:]]
        else:
            ahead = [read] * steps
        places = [*ahead, read]
        return _bucket(phase, bucket, [self._names[phase][place] for place in places])

    def reduced(self) -> Iterator[Bucket]:
        """The buckets in which the backward reduces gradients."""
        open_: dict[tuple[object, ...], list[_Found]] = {}
        full: list[list[_Found]] = []
        for each in sorted(self._reductions(), key=lambda each: each.place):
            bucket = open_.setdefault(each.way, [])
            if bucket and _size(bucket) + _size([each]) > self._plan.bucket_bytes:
                full.append(bucket)
                bucket = open_[each.way] = []
            bucket.append(each)
        full += open_.values()
        full.sort(key=lambda bucket: bucket[-1].place)
        names = [*self._names["backward"], END]
        starts = [*(names[bucket[-1].place + 1] for bucket in full), self._over]
        for k, bucket in enumerate(full):
            issued = [min(k + step, len(full)) for step in range(len(bucket[0].entry.collectives))]
            arrives = min(issued[-1] + 1, len(full))
            if self._plan.gathers_ahead:
                arrives = max(arrives, self._too_many(full, k))
            yield _bucket("backward", bucket, [starts[place] for place in (*issued, arrives)])

    def _too_many(self, full: Sequence[Sequence[_Found]], k: int) -> int:
        """The first bucket with which, beside bucket ``k`` and those between, more is on its way than may be."""
        in_flight = accumulate(map(_size, full[k:]))
        most = MOST_IN_FLIGHT * self._plan.bucket_bytes
        return k + next((ahead for ahead, size in enumerate(in_flight) if ahead and size > most), len(full) - k)

    def _reductions(self) -> Iterator[_Found]:
        for entry in self._plan.redistributions:
            if entry.phase != "backward" or len(entry.consumers) != 1:
                continue
            (name,) = entry.consumers
            parameter, dtype = self._takers.get(name, ("", ""))
            place = self._places["backward"].get(_maker(entry.tensor))
            if not parameter or place is None or parameter in self._unwanted:
                continue
            if self._travels(entry, dtype, REDUCTIONS):
                yield _Found(entry, dtype, place)

    def deferred(self) -> Iterator[Bucket]:
        """What of the forward is waited for where deferred operators and results want it."""
        names, deferred = [*self._names["forward"], END], frozenset(self._plan.deferred)
        places = {name: END if name not in self._places["forward"] else name for name in deferred}
        order = self.order("forward")
        for entry in self._plan.redistributions if deferred else ():
            made = self._places["forward"].get(_maker(entry.tensor))
            wanted = entry.phase == "forward" and bool(entry.consumers) and deferred.issuperset(entry.consumers)
            if wanted and made is not None and self._is_alone(entry):
                read = min((places[name] for name in entry.consumers), key=order.__getitem__)
                found = [_Found(entry, "", order[read])]
                stops = [names[made + 1]] * len(entry.collectives) + [read]
                yield replace(_bucket("forward", found, stops), is_early=True, is_deferred=True)

    def early(self, phase: Phase, taken: Collection[Redistribution]) -> Iterator[Bucket]:
        """What sets out before it is read, of what is not ``taken`` by other buckets."""
        names, arrivals = self._names[phase], list[int]()
        for start, read, entry in sorted(self._early(phase, taken), key=lambda each: each[:2]):
            arrivals = [place for place in arrivals if place > start]
            if len(arrivals) < MOST_EARLY:
                arrivals.append(read)
                times = [collective.predicted_s for collective in entry.collectives]
                before = 1 + times.index(max(times))
                places = [names[start]] * before + [names[read]] * (1 + len(times) - before)
                yield replace(_bucket(phase, [_Found(entry, "", read)], places), is_early=True)

    def _early(self, phase: Phase, taken: Collection[Redistribution]) -> Iterator[tuple[int, int, Redistribution]]:
        """Redistributions of what operators of the phase make, between which and the first reader others take time;
        with the places where they set out and arrive.
        """
        places, names, runs = self._places[phase], self._names[phase], self._runs[phase]
        took = (entry.predicted_ns * (entry.name in runs) for entry in self._plan.execution if entry.phase == phase)
        before = list(accumulate(took, initial=0))
        for entry in self._plan.redistributions:
            made = places.get(_maker(entry.tensor))
            is_open = entry.phase == phase and entry not in taken and entry.tensor not in self._gathered
            readers = [places[name] for name in entry.consumers if name in runs]
            if not is_open or made is None or names[made] not in runs or not readers or not self._is_alone(entry):
                continue
            read = min(readers)
            enough = before[read] - EARLIEST * entry.predicted_s * 1e9
            start = max(made + 1, bisect_right(before, enough) - 1)
            if before[start] < before[read] and all(name in places for name in entry.consumers):
                yield start, read, entry

    def _travels(self, entry: Redistribution, dtype: str, kinds: frozenset[str]) -> bool:
        """Whether a redistribution may travel with others: it communicates by these kinds alone, in numbers that can
        be sent as they are, and nobody reads what is on its way.
        """
        sends = {collective.kind for collective in entry.collectives}
        return sends <= kinds and not dtype.startswith("complex") and self._is_alone(entry)

    def _is_alone(self, entry: Redistribution) -> bool:
        """Whether a redistribution communicates, and no other one has to do with its steps."""
        return _is_alone(entry, self._of_tensor[entry.tensor])


def _is_alone(entry: Redistribution, others: Iterable[Redistribution]) -> bool:
    """Whether a redistribution communicates, and none of the ``others`` of its tensor has to do with its steps."""
    if not entry.collectives or entry.shared or entry.kept:
        return False
    return not any(_reads_on_the_way(other, entry) for other in others)


def _reads_on_the_way(other: Redistribution, entry: Redistribution) -> bool:
    """Whether another redistribution goes on from a step of this one; from its end, only what is kept may."""
    end = len(entry.path) - 1
    common = min(other.shared, end) + 1
    goes_on = other.shared > 0 and other.path[:common] == entry.path[:common]
    return goes_on and not (other.kept and other.shared >= end)


def layer_of(name: str) -> str:
    """The layer of an operator or parameter: ``layers.3`` of ``layers.3.attention.wq/mm``; none outside of layers."""
    parts = name.partition("/")[0].split(".")
    numbered = [k for k, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else ""


def _maker(tensor: str) -> str:
    """The operator that makes a tensor: ``norm/layer_norm`` its second result, which is named ``norm/layer_norm:1``."""
    name, colon, number = tensor.rpartition(":")
    return name if colon and number.isdecimal() else tensor


def _alike(window: Iterable[_Found]) -> Iterator[list[_Found]]:
    """Those of a window that take the same way."""
    groups: dict[tuple[object, ...], list[_Found]] = defaultdict(list)
    for each in window:
        groups[each.way].append(each)
    yield from groups.values()


def _size(found: Iterable[_Found]) -> int:
    return sum(max(collective.size_bytes for collective in each.entry.collectives) for each in found)


def _bucket(phase: Phase, found: Sequence[_Found], places: Sequence[str]) -> Bucket:
    """A bucket whose collectives are issued at ``places``, each where the one before is waited for."""
    members = tuple(each.entry for each in found)
    travels = tuple(
        Travel(each.kind, each.axis, sum(m.collectives[i].size_bytes for m in members), places[i], places[i + 1])
        for i, each in enumerate(members[0].collectives)
    )
    return Bucket(phase, members, travels)
