"""Networks that say the same are said once, at a multiple of the price.

Networks are equal if they have the same vertices, arcs and prices, the same producer with the same map, the same
consumers with the same maps in each phase, and keep copies alike; nodes that are tied count as the same. Tied layers
give such images. Exact because what is cheapest for one of k is cheapest for each, so one network at k times the prices
stands for all; and so it is where the prices of one are a multiple of those of another. Where memory is limited it has
the lives of all; then they are decided alike, as their ties say that they are, and prices have to be the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from ..networks import Base, Consumer, Life, Network
from ..problem import IntArray, Problem, identity
from .reduction import Outcome, Pool, Reduced, Rerouting


def merge_equal_networks(problem: Problem) -> Outcome:
    """The problem with one network for each class of equal ones."""
    seen = _Seen(problem)
    classes: dict[Hashable, list[Network]] = {}
    keys = _numbered([seen.key(network) for network in problem.networks], problem.networks)
    for key, network in zip(keys, problem.networks, strict=True):
        classes.setdefault(key, []).append(network)
    if len(classes) == len(problem.networks):
        return None
    place = {key: position for position, key in enumerate(classes)}
    moved: dict[tuple[int, int], tuple[int, int, list[int]]] = {}
    counts = [0] * len(classes)
    for index, (key, network) in enumerate(zip(keys, problem.networks, strict=True)):
        if not network.lives:
            continue
        orders = zip(seen.order(network), seen.order(classes[key][0]), strict=True)
        position = dict(orders)
        for number in range(len(network.lives)):
            moved[index, number] = place[key], counts[place[key]], [position[k] for k in range(len(position))]
            counts[place[key]] += 1

    def lives(index: int) -> tuple[Life, ...]:
        found = []
        for number, life in enumerate(problem.networks[index].lives):
            position = moved[index, number][2]
            reads = sorted(zip(position, life.reads, strict=True))
            base = life.base
            if base is not None:
                network, of_network, consumers = moved[base.network, base.life]
                again = None if base.again is None else consumers[base.again]
                base = Base(network, of_network, consumers[base.consumer], again)
            found.append(life._replace(reads=tuple(read for _, read in reads), base=base))
        return tuple(found)

    own: dict[int, list[Life]] = {position: [] for position in place.values()}
    for index, key in enumerate(keys):
        own[place[key]] += lives(index)
    times: dict[tuple[int, int], IntArray] = {}

    def merged(members: list[Network], lives: list[Life]) -> Network:
        first, count = members[0].between(seen.end), sum(seen.unit(network)[1] for network in members)
        unit, _ = seen.unit(first)
        key = seen.content(unit), count
        if key not in times:
            times[key] = unit * count
        return replace(first, costs=times[key], lives=tuple(lives))

    networks = tuple(merged(members, own[place[key]]) for key, members in classes.items())
    way_back = Rerouting(
        [place[key] for key in keys], [identity(len(network.costs)) for network in problem.networks], len(networks)
    )
    return Reduced(replace(problem, networks=networks), way_back)


class _Seen:
    """What tells the networks of a problem apart: arrays by their content, nodes by the first of their tie."""

    def __init__(self, problem: Problem) -> None:
        self._pool = Pool()
        self._contents: dict[int, int] = {}
        self._units: dict[int, tuple[IntArray, int]] = {}
        self._first = list(range(len(problem.nodes)))
        for tie in problem.ties:
            for node in tie:
                self._first[node] = min(tie)

    def content(self, array: IntArray) -> int:
        """A number that arrays share that have the same content."""
        found = self._contents.get(id(array))
        if found is None:
            found = self._contents[id(array)] = id(self._pool(array))
        return found

    def unit(self, network: Network) -> tuple[IntArray, int]:
        """The prices of a network in the largest unit that divides all of them, and that; 1 where it has lives."""
        costs = network.costs
        found = self._units.get(id(costs))
        if found is None:
            size = int(np.gcd.reduce(costs)) if len(costs) else 1
            found = self._units[id(costs)] = (costs // size, size) if size > 1 else (costs, 1)
        return found if network.sizes is None else (costs, 1)

    def end(self, node: int, vertices: IntArray) -> Consumer:
        """An end of a network that stands for those of all tied layers: networks that share memory meet at one node."""
        return Consumer(self._first[node], vertices)

    def key(self, network: Network) -> Hashable:
        """What equal networks share."""
        arrays = (network.tails, network.heads, self.unit(network)[0], network.makes)
        again = () if network.again is None else (network.again,)
        phases = self._ends(network.forward), self._ends(network.backward), self._ends(again)
        made = self._first[network.producer]
        same = (network.vertices, made, network.kept, *phases, *map(self.content, arrays))
        if network.sizes is None:
            return same
        return (*same, self.content(network.sizes), network.held, any(life.base is not None for life in network.lives))

    def _ends(self, consumers: tuple[Consumer, ...]) -> tuple[tuple[int, int], ...]:
        found = [(self._first[node], self.content(wants)) for node, wants in consumers]
        return tuple(sorted(found) if len(found) > 1 else found)

    def order(self, network: Network) -> list[int]:
        """The numbers of the consumers in the order in which equal networks agree, the forward's first."""
        of_forward = len(network.forward)
        keys = [
            (k >= of_forward, self._first[node], self.content(wants), k)
            for k, (node, wants) in enumerate(network.consumers)
        ]
        return [k for *_, k in sorted(keys)]


def _numbered(keys: list[Hashable], networks: Sequence[Network]) -> list[Hashable]:
    """The keys, in which networks with lives are equal only if they are made or read at different steps.

    Two tensors of one layer may be equal; which of them is kept in memory is decided for each.
    """
    seen: Counter[Hashable] = Counter()
    numbered: list[Hashable] = []
    for key, network in zip(keys, networks, strict=True):
        at = key, tuple((life.made, life.reads) for life in network.lives)
        numbered.append((key, seen[at]) if network.lives else key)
        seen[at] += 1
    return numbered
