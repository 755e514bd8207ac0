"""What every reduction is: an exact rewrite of a problem into a smaller one, with its way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..networks import Assignment, Consumer, Network, Routes
from ..problem import IntArray, Problem, identity


class WayBack(Protocol):
    """Translates assignments between the problem before a reduction and the one after it."""

    def lift(self, assignment: Assignment) -> Assignment:
        """The assignment of the problem before, at the same cost, from a feasible one of the problem after."""
        ...

    def lower(self, assignment: Assignment) -> Assignment:
        """An assignment of the problem after, near the one of the problem before. It need not be feasible."""
        ...


@dataclass(frozen=True)
class Reduced:
    """The smaller problem and the way back."""

    problem: Problem
    way_back: WayBack


@dataclass(frozen=True)
class Contradiction:
    """The reduction proved that no assignment is feasible; `reason` says why."""

    reason: str


Outcome = Reduced | Contradiction | None
"""None: the reduction found nothing to do."""

Reduction = Callable[[Problem], Outcome]


@dataclass(frozen=True, eq=False)
class Substitution:
    """Every node before is a function of one node after.

    Node i before chooses tables[i][choice of node owners[i]]; with owners[i] = -1 it chooses tables[i][0], a constant.
    """

    owners: Sequence[int]
    tables: Sequence[IntArray]
    nodes_after: int

    def lift(self, assignment: Assignment) -> Assignment:
        """The choices before the rewrite that those after it stand for."""
        choices = tuple(
            int(table[assignment.choices[owner] if owner >= 0 else 0])
            for owner, table in zip(self.owners, self.tables, strict=True)
        )
        return assignment._replace(choices=choices)

    def lower(self, assignment: Assignment) -> Assignment:
        """Per node after, the choice that gives the most nodes before what they had."""
        votes: list[IntArray | None] = [None] * self.nodes_after
        for owner, table, choice in zip(self.owners, self.tables, assignment.choices, strict=True):
            if owner >= 0:
                agrees = (table == choice).astype(np.int64)
                before = votes[owner]
                votes[owner] = agrees if before is None else before + agrees
        choices = tuple(0 if vote is None else int(np.argmax(vote)) for vote in votes)
        return assignment._replace(choices=choices)

    def of_networks(self, networks: Sequence[Network]) -> tuple[Network, ...]:
        """The networks before, between the nodes after; all of their nodes must have owners."""
        known: dict[tuple[int, int], IntArray] = {}

        def end(node: int, vertices: IntArray) -> Consumer:
            table = self.tables[node]
            if table is identity(len(table)):
                return Consumer(self.owners[node], vertices)
            if (id(vertices), id(table)) not in known:
                known[id(vertices), id(table)] = vertices[table]
            return Consumer(self.owners[node], known[id(vertices), id(table)])

        return tuple(network.between(end) for network in networks)


def renumbered(networks: Sequence[Network], number: Mapping[int, int]) -> tuple[Network, ...]:
    """The networks with other numbers for their nodes."""
    return tuple(network.between(lambda node, vertices: Consumer(number[node], vertices)) for network in networks)


@dataclass(frozen=True, eq=False)
class Rerouting:
    """Networks are rewritten and choices are not: network i before takes the routes of network sources[i] after.

    Arc a after is arc arcs[i][a] before; arcs[i] ascends. With sources[i] = -1 network i needs no route.
    """

    sources: Sequence[int]
    arcs: Sequence[IntArray]
    networks_after: int

    def lift(self, assignment: Assignment) -> Assignment:
        """The routes before the rewrite that those after it stand for."""
        known: dict[tuple[int, int], Routes] = {}

        def lifted(source: int, table: IntArray) -> Routes:
            if source < 0:
                return Routes()
            key = source, id(table)
            if key not in known:
                taken = assignment.routes[source]
                known[key] = Routes(*(_ascending(table[list(arcs)]) if arcs else () for arcs in taken))
            return known[key]

        return assignment._replace(routes=tuple(map(lifted, self.sources, self.arcs)))

    def lower(self, assignment: Assignment) -> Assignment:
        """The routes of the first network before that each one after stands for, without the arcs that are gone."""
        routes = [Routes()] * self.networks_after
        for index in reversed(range(len(self.sources))):
            if self.sources[index] >= 0:
                before = assignment.routes[index]
                if any(before) and self.arcs[index] is not identity(len(self.arcs[index])):
                    place = {arc: position for position, arc in enumerate(self.arcs[index].tolist())}
                    before = Routes(*(tuple(place[arc] for arc in arcs if arc in place) for arcs in before))
                routes[self.sources[index]] = before
        return assignment._replace(routes=tuple(routes))


def _ascending(arcs: IntArray) -> tuple[int, ...]:
    return tuple(arcs.tolist())


class Pool:
    """One array object per content, so that equal maps and matrices are recognised by identity."""

    def __init__(self) -> None:
        # Given arrays are kept beside their representatives, so that no id is reused while the pool lives.
        self._by_id: dict[int, tuple[IntArray, IntArray]] = {}
        self._by_content: dict[tuple[tuple[int, ...], bytes], IntArray] = {}
        self._transposed: dict[int, IntArray] = {}

    def __call__(self, array: IntArray) -> IntArray:
        """The first array given that has the content of this one."""
        known = self._by_id.get(id(array))
        if known is None:
            one = self._by_content.setdefault((array.shape, array.tobytes()), array)
            self._by_id[id(array)] = known = (array, one)
            self._by_id[id(one)] = (one, one)
        return known[1]

    def array(self, identity: int) -> IntArray:
        """The array that has this id."""
        return self._by_id[identity][1]

    def transposed(self, array: IntArray) -> IntArray:
        """The transpose, as one array object per content."""
        one = self(array)
        if id(one) not in self._transposed:
            self._transposed[id(one)] = self(np.ascontiguousarray(one.T))
        return self._transposed[id(one)]
