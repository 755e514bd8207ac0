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
consumer k of the backward is to    g_k[v], the part of its flow that starts at v (`solver.backends.flows`)
come, the forward is over
k is to come, j of its phase was    e[v] + o_k[v] - 1, for e[v] the start of k's flow at v, and for e[v] what flows
                                    to j into v;  o_k[v] = x_k[v] + sum over arcs a out of v of y[a],
                                    y[a] >= f_k[a] - sum over such j of f_j[a]:  arcs that j took are there
==================================  =====================================================================

With choices and flows of 0 and 1 that is what `solver.evaluate` counts, but for a copy that the backward makes again at
a vertex while that of the forward is still read there, by a result or through a view: of the two one is counted. What
a producer makes as a view is charged where it looks: alive[m] of the base is at least alive[v] of the view for
strategies that want m and make v. Terms that stand alone go into the row as they are; of several the largest is a
variable. Equal states of tied lives are one term.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from ..networks import Consumer, Network
from ..problem import IntArray, Problem

FUTURE, READING, PAST = range(3)


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
    """

    consumer: Consumer
    arcs: IntArray
    columns: IntArray
    starts: IntArray
    start_columns: IntArray
    made: IntArray
    made_columns: IntArray
    starts_at_producer: bool

    @property
    def key(self) -> tuple[int, int]:
        """Flows to the same node for the same wants are one."""
        return self.consumer.node, id(self.consumer.wants)


@dataclass(frozen=True, eq=False)
class Extension:
    """What a step adds to a program: variables without a price, rows over them, and the terms of the memory row.

    rows: (parts, upper) for sum of coefficient * variable <= upper. terms: variable -> bytes.
    """

    variables: int
    rows: list[tuple[tuple[tuple[int, int], ...], float]]
    terms: dict[int, int]


class Signature(NamedTuple):
    """Where one life of a network stands at a step: whether its producer runs, per consumer FUTURE, READING or PAST,
    and the views of what consumers read: (consumer, signature of the view's network).
    """

    network: int
    running: bool
    reads: tuple[int, ...]
    views: tuple[tuple[int, Signature], ...]


class Holdings:
    """What networks hold, step by step.

    flows: per network the flows of each phase; empty for networks without lives.
    """

    def __init__(self, problem: Problem, first: IntArray, flows: Mapping[int, Sequence[Sequence[FlowColumns]]]) -> None:
        self._problem, self._first, self._flows = problem, first, flows
        self._views: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for index, network in enumerate(problem.networks):
            for number, life in enumerate(network.lives):
                if life.base is not None:
                    self._views[life.base[:2]].append((life.base.consumer, index, number))

    def at(self, step: int, free: int) -> Extension:
        """What all networks hold at a step; new variables are numbered from `free` on."""
        alive: dict[Signature, int] = defaultdict(int)
        for index, network in enumerate(self._problem.networks):
            for number, life in enumerate(network.lives):
                if life.base is None:
                    signature = self._signature(index, number, step)
                    if signature is not None:
                        alive[signature] += 1
        writer = _Writer(self._problem, self._first, self._flows, count(free))
        for signature, times in alive.items():
            writer.write(signature, times)
        return Extension(writer.variables, writer.rows, dict(writer.terms))

    def _signature(self, index: int, number: int, step: int) -> Signature | None:
        """(network, state of the producer, states of the reads, views); None where nothing of it can be alive."""
        life = self._problem.networks[index].lives[number]
        if life.made > step:
            return None
        views = []
        for consumer, view, of_view in self._views.get((index, number), ()):
            found = self._signature(view, of_view, step)
            if found is not None:
                views.append((consumer, found))
        reads = tuple(FUTURE if at > step else READING if step < until else PAST for at, until in life.reads)
        if not views and life.made < step and all(state == PAST for state in reads):
            return None
        return Signature(index, life.made == step, reads, tuple(views))


Alive = dict[int, list[Term]]
"""Per vertex what the variable of a copy there is at least."""


@dataclass(eq=False)
class _Writer:
    problem: Problem
    first: IntArray
    flows: Mapping[int, Sequence[Sequence[FlowColumns]]]
    numbers: Iterator[int]
    rows: list[tuple[tuple[tuple[int, int], ...], float]] = field(default_factory=list)
    terms: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    variables: int = 0

    def write(self, signature: Signature, times: int) -> Alive:
        """Adds what the lives of one signature and their views hold, but for what a view's producer makes: that is
        returned.
        """
        network = self.problem.networks[signature.network]
        of = _Of(self, network, self.flows[signature.network])
        of.life(signature.running, signature.reads)
        for consumer, view in signature.views:
            of.charge(network.consumers[consumer], self.problem.networks[view.network], self.write(view, times))
        is_view = any(life.base is not None for life in network.lives)
        charged = [of.copies] if network.held or is_view else [of.copies, of.source]
        merged: Alive = defaultdict(list)
        for alive in charged:
            for vertex, terms in alive.items():
                merged[vertex] += terms
        assert network.sizes is not None
        for vertex, terms in merged.items():
            size = int(network.sizes[vertex]) * times
            if size:
                self._charge(terms, size)
        return of.source if is_view else {}

    def _charge(self, terms: Sequence[Term], size: int) -> None:
        distinct = list(dict.fromkeys(terms))
        if len(distinct) == 1 and not distinct[0].constant and all(c > 0 for _, c in distinct[0].parts):
            for column, coefficient in distinct[0].parts:
                self.terms[column] += coefficient * size
            return
        column = self.variable()
        for term in distinct:
            self.at_least(column, term)
        self.terms[column] += size

    def variable(self) -> int:
        """A new variable."""
        self.variables += 1
        return next(self.numbers)

    def at_least(self, column: int, term: Term) -> None:
        """The row term <= variable."""
        self.rows.append(((*term.parts, (column, -1)), -float(term.constant)))

    def chosen(self, node: int, vertices: IntArray) -> dict[int, tuple[tuple[int, int], ...]]:
        """Per vertex the choices of a node that make or want the tensor there."""
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for strategy, vertex in enumerate(vertices.tolist()):
            found[vertex].append((int(self.first[node]) + strategy, 1))
        return {vertex: tuple(parts) for vertex, parts in found.items()}


class _Of:
    """One life of a network: the producer's copy (`source`) and the others (`copies`) that are alive at the step."""

    def __init__(self, writer: _Writer, network: Network, flows: Sequence[Sequence[FlowColumns]]) -> None:
        self.writer, self.network = writer, network
        self.flows = [{flow.key: flow for flow in phase} for phase in flows]
        self.makes = writer.chosen(network.producer, network.makes)
        self.source: Alive = defaultdict(list)
        self.copies: Alive = defaultdict(list)

    def life(self, running: bool, reads: Sequence[int]) -> None:
        of_forward = len(self.network.forward)
        phases = (self.network.forward, reads[:of_forward]), (self.network.backward, reads[of_forward:])
        if running:
            self._source()
        for consumer, state in zip(self.network.consumers, reads, strict=True):
            if state == READING:
                self._read(consumer)
        coming = [_those(ends, states, FUTURE) for ends, states in phases]
        gone = [_those(ends, states, READING, PAST) for ends, states in phases]
        if gone[1]:
            self._both(1, gone[1], coming[1])
        elif not gone[0]:
            if coming[0] or coming[1]:
                self._source()
        else:
            self._both(0, gone[0], coming[0])
            for consumer in coming[1]:
                self._kept(self._flow(1, consumer), gone[0] if coming[0] else None)

    def _flow(self, phase: int, consumer: Consumer) -> FlowColumns:
        return self.flows[phase][consumer.node, id(consumer.wants)]

    def _source(self) -> None:
        for vertex, parts in self.makes.items():
            self.source[vertex].append(Term(parts))

    def _read(self, consumer: Consumer) -> None:
        """Whichever copy is at the vertex that is read."""
        if consumer.node == self.network.producer and consumer.wants is self.network.makes:
            return self._source()
        for vertex, parts in self.writer.chosen(*consumer).items():
            self._somewhere(vertex, Term(parts))
        return None

    def _somewhere(self, vertex: int, term: Term) -> None:
        """A copy at a vertex that is alive as a term says: the producer's if that is there, else another."""
        made = self.makes.get(vertex)
        if made is None:
            self.copies[vertex].append(term)
        elif not self.network.held and not any(life.base for life in self.network.lives):
            self.source[vertex].append(term)  # counted alike
        else:
            self.source[vertex].append(term.plus(made, -1))
            self.copies[vertex].append(term.plus(((column, -1) for column, _ in made), 0))

    def _kept(self, flow: FlowColumns, gone: Sequence[Consumer] | None) -> None:
        """What the backward will start from; where some of the forward is to come, of that what is there already."""
        if flow.starts_at_producer:
            return self._source()
        for vertex, column in zip(flow.made.tolist(), flow.made_columns.tolist()):
            self.source[vertex].append(Term(((column, 1),)))
        for vertex, column in zip(flow.starts.tolist(), flow.start_columns.tolist()):
            if gone is None:
                self.copies[vertex].append(Term(((column, 1),)))
                continue
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
                self._read(consumer)
                continue
            needs = self._needs(flow, flows)
            if flow.starts_at_producer:
                starts = [(self.source, vertex, parts) for vertex, parts in self.makes.items()]
            else:
                starts = [
                    (alive, vertex, ((column, 1),))
                    for alive, vertices, columns in (
                        (self.source, flow.made, flow.made_columns),
                        (self.copies, flow.starts, flow.start_columns),
                    )
                    for vertex, column in zip(vertices.tolist(), columns.tolist())
                ]
            starts += [(self.copies, vertex, into) for other in flows for vertex, into in self._into(other).items()]
            for alive, vertex, parts in starts:
                if vertex in needs:
                    alive[vertex].append(Term((*parts, *needs[vertex]), -1))

    def _needs(self, flow: FlowColumns, gone: Sequence[FlowColumns]) -> dict[int, tuple[tuple[int, int], ...]]:
        """Per vertex whether a consumer to come reads there, or goes on from there over an arc that nobody took."""
        needs: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for vertex, parts in self.writer.chosen(*flow.consumer).items():
            needs[vertex] += parts
        taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for other in gone:
            for arc, column in zip(other.arcs.tolist(), other.columns.tolist()):
                taken[arc].append((column, -1))
        own: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for arc, column in zip(flow.arcs.tolist(), flow.columns.tolist()):
            own[arc].append((column, 1))
        for arc, flowing in own.items():
            needed = flowing
            if arc in taken:
                column = self.writer.variable()
                self.writer.at_least(column, Term((*flowing, *taken[arc])))
                needed = [(column, 1)]
            needs[int(self.network.tails[arc])] += needed
        return {vertex: tuple(all_of_it) for vertex, all_of_it in needs.items()}

    def _into(self, flow: FlowColumns) -> dict[int, tuple[tuple[int, int], ...]]:
        into: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for arc, column in zip(flow.arcs.tolist(), flow.columns.tolist()):
            into[int(self.network.heads[arc])].append((column, 1))
        return {vertex: tuple(parts) for vertex, parts in into.items()}

    def charge(self, consumer: Consumer, view: Network, alive: Alive) -> None:
        """What views of what a consumer reads hold of this network."""
        strategies: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        first = int(self.writer.first[view.producer])
        for strategy, (looks, makes) in enumerate(zip(consumer.wants.tolist(), view.makes.tolist(), strict=True)):
            strategies[makes][looks].append((first + strategy, 1))
        for made, terms in alive.items():
            for vertex, parts in strategies[made].items():
                for term in terms:
                    self._somewhere(vertex, term if len(strategies[made]) == 1 else term.plus(parts, -1))


def _those(consumers: Sequence[Consumer], states: Sequence[int], *wanted: int) -> list[Consumer]:
    return [consumer for consumer, state in zip(consumers, states, strict=True) if state in wanted]
