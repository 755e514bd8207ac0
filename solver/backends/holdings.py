"""What the copies of networks hold at one time step, as linear terms of the program.

A copy at vertex v is alive at a step if something before it made the copy and something after it needs it. Of one life
of a network, with `x_u[v]` short for the choices of the producer that make the tensor at v, `x_k[v]` for those of
consumer k that want it there:

==================================  =====================================================================
at the step                         alive[v] is at least
==================================  =====================================================================
the producer runs                   x_u[v]
consumer k reads                    x_k[v]
only consumers to come              x_u[v]: nothing else is made yet
consumer k of the backward is to    g_k[v], the part of its flow that starts at v (`solver.backends.flows`), and
come, the forward is over           h_k[v] where the tensor was made again before
the tensor is made again            x_r[v]
k is to come, j of its phase was    the start of k's flow at v, and the sum of t[a] over arcs a into v, both less the
                                    sum of t[a] over arcs out of v;  t[a] of k's flow is past an arc that such j took:
                                    t[a] <= f_k[a],  t[a] <= sum over them of f_j[a],  t[a] >= f_k[a] + f_j[a] - 1
==================================  =====================================================================

With choices and flows of 0 and 1 that is what `solver.evaluate` counts, but for a copy that the backward makes again at
a vertex while that of the forward is still read there, by a result or through a view: of the two one is counted. What
a producer makes as a view is charged where it looks: alive[m] of the base is at least alive[v] of the view for
strategies that want m and make v. Where a term may fall to one of several, such as to the copy that was made at v or to
one that was taken there, it is shared among variables, each at most what says that it is that one. Terms that stand
alone go into the row as they are; of several the largest is a variable. Equal states of tied lives are one term.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import NamedTuple

from ..networks import NOWHERE, Base, Consumer, Network
from ..problem import IntArray, Problem

FUTURE, READING, PAST = range(3)

Row = tuple[tuple[tuple[int, int], ...], float]
"""(parts, upper) for sum of coefficient * variable <= upper."""

Written = Mapping[Hashable, tuple[int, ...]]
"""Variables by what they stand for: steps that say the same of copies say it with the same ones."""


class Term(NamedTuple):
    """A lower bound of a variable: sum of coefficient * variable, plus a constant."""

    parts: tuple[tuple[int, int], ...]
    constant: int = 0

    def plus(self, parts: Iterable[tuple[int, int]], constant: int) -> Term:
        """The sum of both."""
        return Term((*self.parts, *parts), self.constant + constant)


@dataclass(frozen=True, eq=False)
class FlowColumns:
    """The variables of the way to one consumer: what flows over an arc is the sum of the variables at its places.

    Attributes:
        arcs, columns: one entry for each variable.
        starts, start_columns: vertices with copies that the forward made, at which the flow may start.
        made, made_columns: vertices at which the producer may have made it; empty as the others where the flow starts
            there and nowhere else.
        again, again_columns: vertices at which it may be made again.
    """

    consumer: Consumer
    arcs: IntArray
    columns: IntArray
    starts: IntArray
    start_columns: IntArray
    made: IntArray
    made_columns: IntArray
    again: IntArray
    again_columns: IntArray
    starts_at_producer: bool

    @property
    def key(self) -> tuple[int, int]:
        """Flows to the same node for the same wants are one."""
        return self.consumer.node, id(self.consumer.wants)


@dataclass(frozen=True, eq=False)
class Extension:
    """What a step adds to a program: variables without a price, rows over them, and the terms of the memory row.

    rows: over these. terms: variable -> bytes. written: the variables of this step and those before, by what they stand
    for.
    """

    variables: int
    rows: list[Row]
    terms: dict[int, int]
    written: Written


class Signature(NamedTuple):
    """Where one life of a network stands at a step: whether its producer runs, per consumer FUTURE, READING or PAST,
    the views of what consumers read: (consumer, the one that makes the view again or None, signature of the view's
    network); and the state of what makes the tensor again, FUTURE where nothing does.
    """

    network: int
    running: bool
    reads: tuple[int, ...]
    views: tuple[tuple[int, int | None, Signature], ...]
    again: int = FUTURE


class Holdings:
    """What networks hold, step by step.

    flows: per network the flows of each phase; empty for networks without lives.
    """

    def __init__(self, problem: Problem, first: IntArray, flows: Mapping[int, Sequence[Sequence[FlowColumns]]]) -> None:
        self._problem, self._first, self._flows = problem, first, flows
        self._views: dict[tuple[int, int], list[tuple[Base, int, int]]] = defaultdict(list)
        for index, network in enumerate(problem.networks):
            for number, life in enumerate(network.lives):
                if life.base is not None:
                    self._views[life.base[:2]].append((life.base, index, number))

    def at(self, step: int, free: int, written: Written) -> Extension:
        """What all networks hold at a step; new variables are numbered from `free` on, and those of other steps used
        where they stand for the same.
        """
        alive: dict[Signature, int] = defaultdict(int)
        for index, network in enumerate(self._problem.networks):
            for number, life in enumerate(network.lives):
                if life.base is None:
                    signature = self._signature(index, number, step)
                    if signature is not None:
                        alive[signature] += 1
        writer = _Writer(self._problem, self._first, self._flows, count(free), dict(written))
        for signature, times in alive.items():
            writer.write(signature, times)
        return Extension(writer.variables, writer.rows, dict(writer.terms), writer.written)

    def _signature(self, index: int, number: int, step: int) -> Signature | None:
        """(network, state of the producer, states of the reads, views); None where nothing of it can be alive."""
        life = self._problem.networks[index].lives[number]
        if life.made > step:
            return None
        views = []
        for base, view, of_view in self._views.get((index, number), ()):
            found = self._signature(view, of_view, step)
            if found is not None:
                views.append((base.consumer, base.again, found))
        again = FUTURE
        if life.again is not None and life.again <= step:
            again = READING if life.again == step else PAST
        reads = tuple(FUTURE if at > step else READING if step < until else PAST for at, until in life.reads)
        if not views and life.made < step and again != READING and all(state == PAST for state in reads):
            return None
        return Signature(index, life.made == step, reads, tuple(views), again)


Alive = dict[int, list[Term]]
"""Per vertex what the variable of a copy there is at least."""


@dataclass(eq=False)
class _Writer:
    problem: Problem
    first: IntArray
    flows: Mapping[int, Sequence[Sequence[FlowColumns]]]
    numbers: Iterator[int]
    written: dict[Hashable, tuple[int, ...]]
    rows: list[Row] = field(default_factory=list)
    terms: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    variables: int = 0

    def write(self, signature: Signature, times: int) -> tuple[Alive, Alive]:
        """Adds what the lives of one signature and their views hold, but for what a view's producer makes, and what
        makes it again: that is returned.
        """
        network = self.problem.networks[signature.network]
        of = _Of(self, network, self.flows[signature.network])
        of.life(signature.running, signature.reads, signature.again)
        for consumer, again, found in signature.views:
            view = self.problem.networks[found.network]
            first, second = self.write(found, times)
            of.charge(consumer, Consumer(view.producer, view.makes), first)
            if again is not None and view.again is not None:
                of.charge(again, view.again, second)
        is_view = any(life.base is not None for life in network.lives)
        charged = [of.copies] if network.held or is_view else [of.copies, of.source, of.again]
        merged: Alive = defaultdict(list)
        for alive in charged:
            for vertex, terms in alive.items():
                merged[vertex] += terms
        assert network.sizes is not None
        for vertex, terms in merged.items():
            size = int(network.sizes[vertex]) * times
            if size:
                self._charge(terms, size)
        return (of.source, of.again) if is_view else ({}, {})

    def _charge(self, terms: Sequence[Term], size: int) -> None:
        distinct = list(dict.fromkeys(terms))
        if len(distinct) == 1 and not distinct[0].constant and all(c > 0 for _, c in distinct[0].parts):
            for column, coefficient in distinct[0].parts:
                self.terms[column] += coefficient * size
            return
        (column,), is_new = self.variables_of(frozenset(distinct), 1)
        for term in distinct if is_new else ():
            self.at_least(column, term)
        self.terms[column] += size

    def variables_of(self, what: Hashable, number: int) -> tuple[tuple[int, ...], bool]:
        """The variables that stand for something, and whether they are new."""
        known = self.written.get(what)
        if known is not None:
            return known, False
        self.variables += number
        made = self.written[what] = tuple(islice(self.numbers, number))
        return made, True

    def at_least(self, column: int, term: Term) -> None:
        """The row term <= variable."""
        self.rows.append(((*term.parts, (column, -1)), -float(term.constant)))

    def shared(self, term: Term, among: Sequence[Sequence[tuple[int, int]]]) -> Iterator[Term]:
        """The parts of a term that fall to each of several sums of variables of which one is 1, as variables."""
        shares, are_new = self.variables_of((term, tuple(map(tuple, among))), len(among))
        if are_new:
            self.rows.append(((*term.parts, *((share, -1) for share in shares)), -float(term.constant)))
            for share, parts in zip(shares, among, strict=True):
                self.rows.append((((share, 1), *((column, -factor) for column, factor in parts)), 0.0))
        return (Term(((share, 1),)) for share in shares)

    def chosen(self, node: int, vertices: IntArray) -> dict[int, tuple[tuple[int, int], ...]]:
        """Per vertex the choices of a node that make or want the tensor there."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for strategy, vertex in enumerate(vertices.tolist()):
            if vertex != NOWHERE:
                found[vertex].append((int(self.first[node]) + strategy, 1))
        return {vertex: tuple(parts) for vertex, parts in found.items()}


class _Of:
    """One life of a network: the producer's copy (`source`), the one that is made again (`again`) and the others
    (`copies`) that are alive at the step.
    """

    def __init__(self, writer: _Writer, network: Network, flows: Sequence[Sequence[FlowColumns]]) -> None:
        self.writer, self.network = writer, network
        self.flows = [{flow.key: flow for flow in phase} for phase in flows]
        self.makes = writer.chosen(network.producer, network.makes)
        self.source: Alive = defaultdict(list)
        self.copies: Alive = defaultdict(list)
        self.again: Alive = defaultdict(list)
        self.shared: set[tuple[int, tuple[int, int], Term]] = set()
        self.counts_alike = not network.held and not any(life.base for life in network.lives)

    def life(self, running: bool, reads: Sequence[int], again: int) -> None:
        of_forward = len(self.network.forward)
        phases = (self.network.forward, reads[:of_forward]), (self.network.backward, reads[of_forward:])
        if running:
            self._source()
        if again == READING and self.network.again is not None:
            for vertex, parts in self.writer.chosen(*self.network.again).items():
                self.again[vertex].append(Term(parts))
        for number, state in enumerate(reads):
            if state == READING:
                self._read(number)
        coming = [_those(ends, states, FUTURE) for ends, states in phases]
        gone = [_those(ends, states, READING, PAST) for ends, states in phases]
        if gone[1]:
            self._both(1, gone[1], coming[1])
        elif not gone[0] and (coming[0] or not self.network.is_optional):
            if coming[0] or coming[1]:
                self._source()
        else:
            self._both(0, gone[0], coming[0])
            for consumer in coming[1]:
                flow = self._flow(1, consumer)
                if coming[0] or flow.starts_at_producer:
                    self._kept(flow, gone[0] if coming[0] else None)
                    if again != FUTURE:
                        self._made_again(flow)
                else:
                    self._to_start(flow, again != FUTURE)

    def _number(self, phase: int, consumer: Consumer) -> int:
        """The number of a consumer of a phase among all."""
        of_phase = self.network.backward if phase else self.network.forward
        return phase * len(self.network.forward) + next(k for k, each in enumerate(of_phase) if each is consumer)

    def _flow(self, phase: int, consumer: Consumer) -> FlowColumns:
        return self.flows[phase][consumer.node, id(consumer.wants)]

    def _source(self) -> None:
        for vertex, parts in self.makes.items():
            self.source[vertex].append(Term(parts))

    def _read(self, number: int) -> None:
        """Whichever copy is at the vertex that the consumer of this number reads."""
        consumer = self.network.consumers[number]
        if consumer.node == self.network.producer and consumer.wants is self.network.makes:
            return self._source()
        for vertex, parts in self.writer.chosen(*consumer).items():
            self._somewhere(number, vertex, Term(parts))
        return None

    def _somewhere(self, number: int, vertex: int, term: Term) -> None:
        """A copy at a vertex that is alive as a term says, and that the consumer of this number reads: the one that is
        made there, or made again, if it is that, else another.
        """
        if self.counts_alike:
            (self.source if vertex in self.makes else self.copies)[vertex].append(term)  # all counted alike
            return
        consumer = self.network.consumers[number]
        flow = self._flow(int(number >= len(self.network.forward)), consumer)
        into = self._into(flow).get(vertex, ())
        places = [(alive, parts) for alive, at, parts in self._starts(flow) if at == vertex]
        places += [(self.copies, into)] if into else []
        if len(places) == 1:
            places[0][0][vertex].append(term)
            return
        if (vertex, flow.key, term) in self.shared:
            return
        self.shared.add((vertex, flow.key, term))
        for (alive, _), share in zip(places, self.writer.shared(term, [parts for _, parts in places])):
            alive[vertex].append(share)

    def _starts(self, flow: FlowColumns) -> Iterator[tuple[Alive, int, tuple[tuple[int, int], ...]]]:
        """Where a flow starts: whose copy, its vertex, and the variables that say so."""
        if flow.starts_at_producer:
            yield from ((self.source, vertex, parts) for vertex, parts in self.makes.items())
        for alive, vertices, columns in (
            (self.source, flow.made, flow.made_columns),
            (self.copies, flow.starts, flow.start_columns),
            (self.again, flow.again, flow.again_columns),
        ):
            for vertex, column in zip(vertices.tolist(), columns.tolist()):
                yield alive, vertex, ((column, 1),)

    def _to_start(self, flow: FlowColumns, is_made_again: bool) -> None:
        """What a flow of the backward will start from once the forward is over: it starts at one place, so that the
        variables of one vertex are one term where they are counted alike.
        """
        starts = [each for each in self._starts(flow) if is_made_again or each[0] is not self.again]
        if not self.counts_alike:
            for alive, vertex, parts in starts:
                alive[vertex].append(Term(parts))
            return
        at: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for _, vertex, parts in starts:
            at[vertex] += parts
        for vertex, together in at.items():
            self.source[vertex].append(Term(tuple(together)))

    def _made_again(self, flow: FlowColumns) -> None:
        for vertex, column in zip(flow.again.tolist(), flow.again_columns.tolist()):
            self.again[vertex].append(Term(((column, 1),)))

    def _kept(self, flow: FlowColumns, gone: Sequence[Consumer] | None) -> None:
        """What the backward will start from; where some of the forward is to come, of that what is there already."""
        if flow.starts_at_producer:
            return self._source()
        there = {self._flow(0, consumer).key for consumer in gone or ()}
        to_come = [other for key, other in self.flows[0].items() if key not in there]
        for vertex, column in zip(flow.made.tolist(), flow.made_columns.tolist()):
            self.source[vertex].append(Term(((column, 1),)))
        for vertex, column in zip(flow.starts.tolist(), flow.start_columns.tolist()):
            if gone is None:
                self.copies[vertex].append(Term(((column, 1),)))
                continue
            made_late = [(late, -1) for other in to_come for late, _ in self._into(other).get(vertex, ())]
            self.copies[vertex].append(Term(((column, 1), *made_late)))
            for other in gone:
                into = self._into(self._flow(0, other)).get(vertex)
                if into is not None:
                    self.copies[vertex].append(Term(((column, 1), *into), -1))
        return None

    def _both(self, phase: int, gone: Sequence[Consumer], coming: Sequence[Consumer]) -> None:
        """Some consumers of a phase have what they want, others are to come."""
        flows = [self._flow(phase, consumer) for consumer in gone]
        keys = {flow.key for flow in flows}
        for consumer in coming:
            flow = self._flow(phase, consumer)
            if flow.key in keys:
                self._read(self._number(phase, consumer))
                continue
            taken = self._taken(flow, flows)
            left: dict[int, list[tuple[int, int]]] = defaultdict(list)
            come: dict[int, list[tuple[int, int]]] = defaultdict(list)
            for arc, parts in taken.items():
                left[int(self.network.tails[arc])] += [(column, -factor) for column, factor in parts]
                come[int(self.network.heads[arc])] += parts
            for alive, vertex, parts in self._starts(flow):
                alive[vertex].append(Term((*parts, *left[vertex])))
            for vertex, arrived in come.items():
                self.copies[vertex].append(Term((*arrived, *left[vertex])))

    def _taken(self, flow: FlowColumns, gone: Sequence[FlowColumns]) -> dict[int, tuple[tuple[int, int], ...]]:
        """Per arc of a flow that others may have taken already what of the flow is at its head since then."""
        carried = [_summed(other.arcs, other.columns) for other in gone]
        taken: dict[int, tuple[tuple[int, int], ...]] = {}
        for arc, flowing in _summed(flow.arcs, flow.columns).items():
            others = [parts[arc] for parts in carried if arc in parts]
            if flowing in others:  # one variable says it of both
                taken[arc] = flowing
            elif others:
                (there,), is_new = self.writer.variables_of((flowing, tuple(others)), 1)
                if is_new:
                    for most in (flowing, tuple(part for parts in others for part in parts)):
                        self.writer.rows.append((((there, 1), *((column, -factor) for column, factor in most)), 0.0))
                    for parts in others:
                        self.writer.at_least(there, Term((*flowing, *parts), -1))
                taken[arc] = ((there, 1),)
        return taken

    def _into(self, flow: FlowColumns) -> dict[int, tuple[tuple[int, int], ...]]:
        return _summed(self.network.heads[flow.arcs], flow.columns)

    def charge(self, number: int, view: Consumer, alive: Alive) -> None:
        """What views of what the consumer of this number reads hold of this network, made where `view` says."""
        strategies: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        first = int(self.writer.first[view.node])
        looks_at = self.network.consumers[number].wants
        for strategy, (looks, makes) in enumerate(zip(looks_at.tolist(), view.wants.tolist(), strict=True)):
            if NOWHERE not in (looks, makes):
                strategies[makes][looks].append((first + strategy, 1))
        for made, terms in alive.items():
            for term in dict.fromkeys(terms):
                looked_at = list(strategies[made].items())
                if len(looked_at) == 1:
                    self._somewhere(number, looked_at[0][0], term)
                    continue
                for (vertex, _), share in zip(looked_at, self.writer.shared(term, [each for _, each in looked_at])):
                    self._somewhere(number, vertex, share)


def _summed(places: IntArray, columns: IntArray) -> dict[int, tuple[tuple[int, int], ...]]:
    """Per place the sum of the variables there, as parts of a term."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for place, column in zip(places.tolist(), columns.tolist(), strict=True):
        found[place].append((column, 1))
    return {place: tuple(parts) for place, parts in found.items()}


def _those(consumers: Sequence[Consumer], states: Sequence[int], *wanted: int) -> list[Consumer]:
    return [consumer for consumer, state in zip(consumers, states, strict=True) if state in wanted]
