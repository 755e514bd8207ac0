"""What one rank does in a step, moment by moment, and the memory that is in use from one moment to another: of a whole
step, too, from the course of a shortened one (:mod:`autoshard.planning.shortened`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from ..plans import MemoryPhase, TenantKind
from .short_graph import NotPeriodicError
from .shortened import Shortened

Moment = tuple[MemoryPhase, str]
"""The phase, and the operator in whose turn it is."""


@dataclass(slots=True)
class Lifetime:
    """A storage from the moment it is made to the last one it is needed at, both included.

    ``is_held`` says that it is there from the beginning, ``bucket`` in the turn of which bucket of the schedule it was
    made, by its key.
    """

    name: str
    kind: TenantKind
    size_bytes: int
    first: int
    last: int
    is_held: bool = False
    bucket: object = None


@dataclass(frozen=True, eq=False)
class Course:
    """The moments of a step, all memory with its lifetime, and the bytes that operators computed again save by name."""

    moments: Sequence[Moment]
    lifetimes: Sequence[Lifetime]
    saved: Mapping[str, int]


def lengthened(course: Course, short: Shortened) -> Course:
    """The course of the step that was shortened.

    Raises:
        NotPeriodicError: what the layers do that are the same is not the same.
    """
    return _Lengthened(course, short).course()


@dataclass(frozen=True)
class _Segment:
    """The moments of one layer, by its number in the shortened step, in one of the ``chains`` of such: layers that
    follow each other.
    """

    chain: int
    number: int
    start: int
    end: int


class _Lengthened:
    def __init__(self, course: Course, short: Shortened) -> None:
        self._course, self._long, self._out = course, short.long, short.out
        segments = list(self._segments())
        self._of = {(each.chain, each.number): each for each in segments}
        for chain in {each.chain for each in segments}:
            self._check_chain(chain)
        self._at: list[_Segment | None] = [None] * len(course.moments)
        for each in segments:
            self._at[each.start : each.end] = [each] * (each.end - each.start)
        self._moments: list[Moment] = []
        self._places: list[int] = []  # of each moment of the shortened step that in the whole one
        self._starts: dict[tuple[int, int], int] = {}  # of the moments of each layer of the whole step, by chain
        self._write_moments()

    def course(self) -> Course:
        found = [copy for each in self._course.lifetimes for copy in self._copies(each)]
        self._check_made()
        return Course(self._moments, [*found, *self._buffers()], dict(self._saved()))

    def _segments(self) -> Iterator[_Segment]:
        moments = self._course.moments
        chain, step, start = 0, 0, 0
        before: tuple[str, int | None] = "", None
        for key, run in groupby((phase, self._out.number_of(operator)) for phase, operator in moments):
            number, end = key[1], start + sum(1 for _ in run)
            taken = 0 if number is None or before[1] is None or key[0] != before[0] else number - before[1]
            goes_on = taken in (1, -1) and step in (0, taken)
            chain, step = (chain, taken) if goes_on else (chain + 1, 0)
            if number is not None:
                yield _Segment(chain, number, start, end)
            before, start = key, end

    def _check_chain(self, chain: int) -> None:
        """Checks that the layers at the cut, and those that these have to do with, do the same; all of them or none."""
        out = self._out
        low, high = out.cut - out.period - out.reach, out.cut + out.reach
        found = [self._of.get((chain, number)) for number in range(low, high + 1)]
        if not any(self._of.get((chain, number)) for number in (out.cut - 1, out.cut)):
            return
        done = [self._done(segment) for segment in found if segment is not None]
        if len(done) < len(found) or any(a != b for a, b in zip(done, done[out.period :])):
            raise NotPeriodicError

    def _done(self, segment: _Segment) -> list[str]:
        places = (self._out.stack.where(name) for _, name in self._course.moments[segment.start : segment.end])
        return [where[1] for where in places if where is not None]

    def _write_moments(self) -> None:
        out, before = self._out, None
        for k, moment in enumerate(self._course.moments):
            segment = self._at[k]
            if segment is not None and segment is not before:
                if before is not None and before.chain == segment.chain:
                    if {before.number, segment.number} == {out.cut - 1, out.cut}:
                        self._write_copies(segment.chain, ascends=segment.number == out.cut)
                self._starts[segment.chain, out.layer(segment.number)] = len(self._moments)
            before = segment
            self._places.append(len(self._moments))
            self._moments.append(moment)

    def _write_copies(self, chain: int, ascends: bool) -> None:
        out = self._out
        for layer in out.layers if ascends else reversed(out.layers):
            segment = self._of[chain, out.like(layer)]
            self._starts[chain, layer] = len(self._moments)
            for phase, name in self._course.moments[segment.start : segment.end]:
                self._moments.append((phase, self._out.renamed(name, segment.number, layer)))

    def _copies(self, made: Lifetime) -> Iterator[Lifetime]:
        """The lifetimes in the whole step that one in the shortened step stands for."""
        if made.bucket in self._long:
            return
        number = self._owner(made)
        if number is None:
            yield replace(made, first=self._places[made.first], last=self._places[made.last])
            return
        for layer in (self._out.layer(number), *self._out.copies(number)):
            name = self._out.renamed(made.name, number, layer)
            first, last = (self._placed(moment, number, layer) for moment in (made.first, made.last))
            yield Lifetime(name, made.kind, made.size_bytes, first, last, made.is_held, made.bucket)

    def _owner(self, made: Lifetime) -> int | None:
        """The number of the layer that makes something, or that holds it from the beginning; None for one of none."""
        if made.is_held:
            return self._out.number_of(made.name)
        segment = self._at[made.first]
        return segment.number if segment is not None else None

    def _placed(self, moment: int, number: int, layer: int) -> int:
        """The place of a moment that something ends or begins at that is of a layer of the whole step, and in the
        shortened step of that of a number.
        """
        segment = self._at[moment]
        if segment is None:
            return self._places[moment]
        start = self._starts.get((segment.chain, layer + segment.number - number))
        if start is None or abs(segment.number - number) > self._out.reach:
            raise NotPeriodicError
        return start + moment - segment.start

    def _check_made(self) -> None:
        """Checks that the layers on both sides of the cut make the same."""
        out = self._out
        made: dict[int, Counter[tuple[object, ...]]] = defaultdict(Counter)
        for each in self._course.lifetimes:
            number = self._owner(each)
            if number is not None and each.bucket not in self._long:
                place = (self._relative(moment, number) for moment in (each.first, each.last))
                name = self._out.renamed(each.name, number, out.cut)
                made[number][(name, each.kind, each.size_bytes, each.is_held, each.bucket is None, *place)] += 1
        if any(made[k] != made[k + out.period] for k in range(out.cut - out.period, out.cut)):
            raise NotPeriodicError

    def _relative(self, moment: int, number: int) -> tuple[object, ...]:
        segment = self._at[moment]
        if segment is None:
            return (moment,)
        return segment.chain, segment.number - number, moment - segment.start

    def _buffers(self) -> Iterator[Lifetime]:
        """What is made in the turns of buckets with tensors of all layers: nothing but buffers for all of them."""
        of_bucket: dict[object, list[Lifetime]] = defaultdict(list)
        for each in self._course.lifetimes:
            if each.bucket in self._long:
                of_bucket[each.bucket].append(each)
        for key, found in of_bucket.items():
            long = self._long[key]
            for each in found:
                size, over = divmod(each.size_bytes * long.size_bytes, long.short_bytes)
                if over or len(found) > long.buffers:
                    raise NotPeriodicError
                name = long.name if each.name == long.short_name else each.name
                first, last = self._places[each.first], self._places[each.last]
                yield replace(each, name=name, size_bytes=size, first=first, last=last)

    def _saved(self) -> Iterator[tuple[str, int]]:
        for name, size in self._course.saved.items():
            number = self._out.number_of(name)
            if number is None:
                yield name, size
            else:
                for layer in (self._out.layer(number), *self._out.copies(number)):
                    yield self._out.renamed(name, number, layer), size
