"""The cheapest routes of a network, once everybody has chosen.

Without memory the networks of a problem do not know of each other, and each is a Steiner arborescence: from the vertex
where the tensor is made to every vertex where it is wanted. Let `least[T][v]` be the least cost of arcs that lead from
vertex v to every target of the set T:

    least[{t}][v] = shortest way from v to t
    least[T][v]   = min of   least[U][v] + least[T - U][v]              the ways part at v
                             cost of an arc (v, w) + least[T][w]        they share an arc first

That is exact for up to MOST_TARGETS targets (3^k additions of arrays over the vertices). Beyond, targets are joined one
by one, the nearest first, by a shortest way from what is there already. Sources: Dreyfus and Wagner, "The Steiner
problem in graphs", 1971; Takahashi and Matsuyama, "An approximate solution for the Steiner problem in graphs", 1980.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .integers import INFEASIBLE, IntArray
from .networks import NOWHERE, Assignment, Network, Routes
from .problem import Problem

MOST_TARGETS = 7

NONE = -1
"""The arc by which a vertex is reached that no arc reaches."""


class Router:
    """Finds routes, those of networks with equal arrays once."""

    def __init__(self) -> None:
        # Arrays are kept beside what was found for them, so that no id is reused while the router lives.
        self._known: dict[object, tuple[Network, Routes | None]] = {}

    def routed(
        self,
        problem: Problem,
        choices: Sequence[int],
        offered: Sequence[Collection[int]] | None = None,
        given: Mapping[int, Routes] | None = None,
    ) -> Assignment | None:
        """The choices with cheapest routes for every network; None where a consumer cannot be reached.

        offered: for each network arcs that a solver used. They are tried beside where the search is not exact.
        given: networks with routes of their own, which are taken as they are but for arcs that lead nowhere.
        """
        routes: list[Routes] = []
        for index, network in enumerate(problem.networks):
            found = None
            if given is not None and index in given:
                found = self._of_given(network, choices, given[index])
            if found is None:
                found = self._network(network, choices, () if offered is None else offered[index])
            if found is None:
                return None
            routes.append(found)
        return Assignment(tuple(choices), tuple(routes))

    def _network(self, network: Network, choices: Sequence[int], offered: Collection[int]) -> Routes | None:
        arrays, wanted = _arrays(network), _wanted(network, choices)
        key = arrays, wanted, tuple(sorted(offered))
        if key not in self._known:
            source, again, forward, backward = wanted
            self._known[key] = network, cheapest_routes(network, source, forward, backward, offered, again)
        return self._known[key][1]

    def _of_given(self, network: Network, choices: Sequence[int], given: Routes) -> Routes | None:
        """What the consumers of a network need of the routes given for it; None where they do not lead to all."""
        arrays, wanted = _arrays(network), _wanted(network, choices)
        key = arrays, wanted, given
        if key not in self._known:
            self._known[key] = network, _needed_of(network, wanted, given)
        return self._known[key][1]


class _Wanted(NamedTuple):
    """The vertices where a tensor is made and made again, or NOWHERE; and the others that are wanted in each phase."""

    source: int
    again: int
    forward: frozenset[int]
    backward: frozenset[int]


def _wanted(network: Network, choices: Sequence[int]) -> _Wanted:
    source, again = int(network.makes[choices[network.producer]]), network.made_again(choices)
    forward, backward = (
        frozenset(int(wants[choices[node]]) for node, wants in consumers) - {start, NOWHERE}
        for start, consumers in (
            (source, network.forward),
            (source if again == NOWHERE else again, network.backward),
        )
    )
    return _Wanted(source, again, forward, backward)


def _arrays(network: Network) -> tuple[object, ...]:
    """What tells networks apart beside what is wanted of them."""
    return id(network.tails), id(network.heads), id(network.costs), network.vertices, network.kept


def _needed_of(network: Network, wanted: _Wanted, routes: Routes) -> Routes | None:
    """What the consumers of a network need of its routes; None where they do not lead to all of them."""
    source, remade, forward, backward = wanted
    there = _reaching(network, [source], routes.forward)
    if remade != NOWHERE:
        new = _reaching(network, [remade], routes.backward)
        if not (forward <= {source, *there} and backward <= {remade, *new}):
            return None
        phases = (_towards(network, there, forward), _towards(network, new, backward))
        return Routes(*(_ascending(needed.values()) for needed in phases))
    kept = {source, *(there if network.kept else ())}
    again = {int(network.heads[arc]) for arc in routes.backward}
    new = _reaching(
        network, sorted(vertex for vertex in kept if vertex == source or vertex not in again), routes.backward
    )
    if not (forward <= {source, *there} and backward <= {*kept, *new}):
        return None
    needed = _towards(network, new, backward)
    starts = {int(network.tails[arc]) for arc in needed.values()} | (backward - new.keys())
    first = _towards(network, there, forward)
    if not (starts - needed.keys() - {source}) <= first.keys():
        return None  # the backward would start from what no consumer of the forward has made
    return Routes(_ascending(first.values()), _ascending(needed.values()))


def _reaching(network: Network, start: Sequence[int], arcs: Iterable[int]) -> dict[int, int]:
    """For every vertex that the arcs lead to from the start, and is none of it, the arc that reaches it."""
    leaving: dict[int, list[int]] = {}
    for arc in sorted(arcs):
        leaving.setdefault(int(network.tails[arc]), []).append(arc)
    by: dict[int, int] = {}
    waiting = list(start)
    for vertex in waiting:
        for arc in leaving.get(vertex, ()):
            head = int(network.heads[arc])
            if head not in start and head not in by:
                by[head] = arc
                waiting.append(head)
    return by


def distances(network: Network, sources: IntArray) -> IntArray:
    """(sources, V): what the shortest way from each source to each vertex costs, INFEASIBLE where there is none."""
    ways = np.full((len(sources), network.vertices), INFEASIBLE, np.int64)
    for row, source in enumerate(sources.tolist()):
        ways[row, source] = 0
        ways[row] = _relaxed(ways[row], network.heads, network.tails, network.costs)[0]
    return ways


def routed(
    problem: Problem,
    choices: Sequence[int],
    offered: Sequence[Collection[int]] | None = None,
    given: Mapping[int, Routes] | None = None,
) -> Assignment | None:
    """The choices with cheapest routes for every network; None where a consumer cannot be reached.

    offered, given: see `Router.routed`.
    """
    return Router().routed(problem, choices, offered, given)


def cheapest_routes(
    network: Network,
    source: int,
    forward: frozenset[int],
    backward: frozenset[int],
    offered: Collection[int] = (),
    again: int = NOWHERE,
) -> Routes | None:
    """Routes from the vertex `source` to the vertices that each phase wants; None where one cannot be reached. Those of
    the backward start at the vertex `again`, if there is one.

    Where copies are kept, what both phases need is paid once: one set of arcs for all, of which the forward takes what
    it needs.
    """
    if not network.kept or again != NOWHERE:
        there = _arborescence(network, source, forward, offered)
        new = _arborescence(network, source if again == NOWHERE else again, backward, offered)
        return None if there is None or new is None else Routes(_ascending(there.values()), _ascending(new.values()))
    all_of_it = _arborescence(network, source, forward | backward, offered)
    if all_of_it is None:
        return None
    there = _towards(network, all_of_it, forward)
    rest = all_of_it.keys() - there.keys()
    return Routes(_ascending(there.values()), _ascending(all_of_it[vertex] for vertex in rest))


def _ascending(arcs: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(arcs))


def _arborescence(
    network: Network, source: int, targets: frozenset[int], offered: Collection[int]
) -> dict[int, int] | None:
    """For every vertex on the way the arc by which it is reached."""
    wanted = sorted(targets - {source})
    if not wanted:
        return {}
    if len(wanted) <= MOST_TARGETS:
        arcs = _exact(network, source, wanted)
        return None if arcs is None else _tree(network, source, arcs, wanted)
    free = np.zeros(len(network.costs), np.bool_)
    free[list(offered)] = True
    trees = [_joined(network, source, wanted, costs) for costs in (network.costs, np.where(free, 0, network.costs))]
    found = [tree for tree in trees if tree is not None]
    return min(found, key=lambda tree: int(network.costs[list(tree.values())].sum()), default=None)


def _exact(network: Network, source: int, targets: list[int]) -> set[int] | None:
    """The arcs of a cheapest arborescence, by the recursion of the module's docstring over sets of targets."""
    every = (1 << len(targets)) - 1
    least: dict[int, IntArray] = {}
    parts: dict[int, IntArray] = {}
    arcs: dict[int, IntArray] = {}
    for chosen in range(1, every + 1):
        if chosen & (chosen - 1) == 0:
            start = np.full(network.vertices, INFEASIBLE, np.int64)
            start[targets[chosen.bit_length() - 1]] = 0
        else:
            start, parts[chosen] = _parted(least, chosen)
        least[chosen], arcs[chosen] = _relaxed(start, network.tails, network.heads, network.costs)
    if least[every][source] >= INFEASIBLE:
        return None
    used: set[int] = set()
    waiting = [(source, every)]
    while waiting:
        vertex, chosen = waiting.pop()
        arc = int(arcs[chosen][vertex])
        if arc != NONE:
            used.add(arc)
            waiting.append((int(network.heads[arc]), chosen))
        elif chosen in parts:
            part = int(parts[chosen][vertex])
            waiting += [(vertex, part), (vertex, chosen ^ part)]
    return used


def _parted(least: dict[int, IntArray], chosen: int) -> tuple[IntArray, IntArray]:
    """Per vertex the least cost if the ways to the chosen targets part there, and the part that goes one way."""
    lowest = chosen & -chosen  # it goes with the part, so that each split is looked at once
    best = np.full_like(least[lowest], INFEASIBLE)
    part_of = np.zeros_like(best)
    part = (chosen - 1) & chosen
    while part:
        if part & lowest:
            total = least[part] + least[chosen ^ part]
            better = total < best
            best[better], part_of[better] = total[better], part
        part = (part - 1) & chosen
    return best, part_of


def _relaxed(start: IntArray, ends: IntArray, starts: IntArray, costs: IntArray) -> tuple[IntArray, IntArray]:
    """Per vertex v the least of `start[w]` plus a way from w to v, and the last arc of that way, or NONE.

    Arcs go from `starts` to `ends`: give heads and tails turned around to walk them backwards.

    Values are improved strictly and costs are not negative, so following the arcs never runs in a circle.
    """
    values, by = start, np.full(len(start), NONE, np.int64)
    while True:
        through = values[starts] + costs
        lower = values.copy()
        np.minimum.at(lower, ends, through)
        gives = np.flatnonzero((through == lower[ends]) & (through < values[ends]))
        if not len(gives):
            return values, by
        by[ends[gives[::-1]]] = gives[::-1]  # of equal ones the first
        values = lower


def _joined(network: Network, source: int, targets: list[int], costs: IntArray) -> dict[int, int] | None:
    """Targets joined to a growing tree, the nearest first."""
    arcs: set[int] = set()
    there, left = {source}, set(targets)
    while left:
        start = np.full(network.vertices, INFEASIBLE, np.int64)
        start[list(there)] = 0
        distance, by = _relaxed(start, network.heads, network.tails, costs)
        nearest = min(sorted(left), key=lambda vertex: int(distance[vertex]))
        if distance[nearest] >= INFEASIBLE:
            return None
        vertex = nearest
        while vertex not in there:
            there.add(vertex)
            arcs.add(int(by[vertex]))
            vertex = int(network.tails[by[vertex]])
        left -= there
    return _tree(network, source, arcs, targets)


def _tree(network: Network, source: int, arcs: Iterable[int], targets: Iterable[int]) -> dict[int, int]:
    """Of the arcs a tree that leads from the source to the targets and nowhere else: vertex -> arc that reaches it."""
    return _towards(network, _reaching(network, [source], arcs), targets)


def _towards(network: Network, tree: dict[int, int], targets: Iterable[int]) -> dict[int, int]:
    """The part of a tree that leads to the targets."""
    needed: dict[int, int] = {}
    for vertex in targets:
        while vertex in tree and vertex not in needed:
            needed[vertex] = tree[vertex]
            vertex = int(network.tails[tree[vertex]])
    return needed
