"""Networks keep only what can be used: the arcs of ways from where the tensor may be made to where it may be wanted.

Dropped are arcs that no vertex of the producer leads to or that lead to no vertex of a consumer, all but the first of
the cheapest arcs between the same two vertices, arcs from a vertex to itself, vertices that are left without use, and
networks without consumers. A consumer is dropped that always wants the vertex at which the tensor is made, or what
another one (in the forward, where copies are kept) has it make anyway. Exact because cheapest routes never
use such an arc, or can do without it at the same price, and what is dropped of consumers asks for nothing. A network
whose copies hold memory keeps its consumers, which say when.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..networks import NOWHERE, Consumer, Network, reached, rebased
from ..problem import IntArray, Problem, identity
from .reduction import Outcome, Pool, Reduced, Rerouting


def trim_networks(problem: Problem) -> Outcome:
    """The problem with networks of arcs that can be used."""
    if not problem.networks:
        return None
    trimming = _Trimming()
    networks: list[Network] = []
    sources: list[int] = []
    tables: list[IntArray] = []
    for network in problem.networks:
        smaller, arcs = trimming.trimmed(network)
        needed = bool(smaller.consumers or smaller.lives)
        sources.append(len(networks) if needed else -1)
        tables.append(arcs)
        if needed:
            networks.append(smaller)
    if len(networks) == len(problem.networks) and all(new is old for new, old in zip(networks, problem.networks)):
        return None
    left = rebased(networks, lambda base: base._replace(network=sources[base.network]))
    return Reduced(replace(problem, networks=left), Rerouting(sources, tables, len(networks)))


class _Trimming:
    """Shares the arrays of networks that are trimmed alike."""

    def __init__(self) -> None:
        self.pool = Pool()

    def trimmed(self, network: Network) -> tuple[Network, IntArray]:
        """The network itself if there is nothing to drop; and the arcs that are kept."""
        forward, backward = self._consumers(network)
        wanted = np.unique(np.concatenate([network.makes[:0], *(end.somewhere for end in (*forward, *backward))]))
        kept = _useful(network, wanted)
        same_ends = len(forward) == len(network.forward) and len(backward) == len(network.backward)
        used = np.unique(np.concatenate([network.sources, wanted, network.tails[kept], network.heads[kept]]))
        if same_ends and len(kept) == len(network.costs) and len(used) == network.vertices:
            return network, identity(len(kept))
        place = np.full(network.vertices + 1, NOWHERE, np.int64)  # the last is that of NOWHERE
        place[used] = np.arange(len(used))
        smaller = replace(
            network,
            vertices=len(used),
            tails=self.pool(place[network.tails[kept]]),
            heads=self.pool(place[network.heads[kept]]),
            costs=self.pool(network.costs[kept]),
            sizes=None if network.sizes is None else self.pool(network.sizes[used]),
            makes=self.pool(place[network.makes]),
            forward=tuple(Consumer(node, self.pool(place[wants])) for node, wants in forward),
            backward=tuple(Consumer(node, self.pool(place[wants])) for node, wants in backward),
            again=network.again and Consumer(network.again.node, self.pool(place[network.again.wants])),
        )
        return smaller, kept

    def _consumers(self, network: Network) -> tuple[list[Consumer], list[Consumer]]:
        """Those of each phase that ask for something that nobody before them asks for; all, where copies have lives, or
        the backward may want nothing.
        """
        if network.lives or network.is_optional:
            return list(network.forward), list(network.backward)
        made = (network.producer, id(self.pool(network.makes)))
        asked = {made}
        phases: list[list[Consumer]] = []
        for consumers in (network.forward, network.backward):
            if not network.kept:
                asked = {made}
            phases.append([])
            for node, wants in consumers:
                key = (node, id(self.pool(wants)))
                if key not in asked:
                    phases[-1].append(Consumer(node, wants))
                asked.add(key)
        return phases[0], phases[1]


def _useful(network: Network, wanted: IntArray) -> IntArray:
    """The arcs on ways from where the tensor may be made to the wanted vertices, the cheapest of parallel ones."""
    there = reached(network.vertices, network.tails, network.heads, network.sources)
    needed = reached(network.vertices, network.heads, network.tails, wanted)
    useful = np.flatnonzero(there[network.tails] & needed[network.heads] & (network.tails != network.heads))
    order = useful[np.lexsort((useful, network.costs[useful], network.heads[useful], network.tails[useful]))]
    ends = np.stack([network.tails[order], network.heads[order]])
    first = np.ones(len(order), np.bool_)
    first[1:] = (ends[:, 1:] != ends[:, :-1]).any(axis=0)
    return np.sort(order[first])
