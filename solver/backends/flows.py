"""A network in the integer program: from the producer's vertex a flow to every consumer, and what they share paid once.

For consumer k with the choices x_k, and the producer's x_u:

    f_k[a] in [0, 1]     what flows over arc a to consumer k
    w[a] >= f_k[a]       arc a is used, by whichever consumer; 1 or 0
    for every vertex l:  sum over s with makes[s] = l of x_u[s]  +  sum of f_k into l
                       = sum of f_k out of l  +  sum over s with wants_k[s] = l of x_k[s]
    price                sum of costs[a] w[a]

For two consumers, the most frequent case of several, the same is said without the rows w >= f: c is what flows to both,
o_k what flows to one alone, f_k = c + o_k, and c + o_1 + o_2, the larger of the two, is paid.

Where copies are kept one set of w serves both phases, since the backward may start from all that the forward reached;
else each phase has its own. Where memory is limited the phases are apart, too, and the flow to a consumer k of the
backward starts from what is kept:

    g_k[v] in [0, 1]     the flow to k starts at vertex v
    g_k[v] <= what the producer makes at v, or what flows into v in the forward; one variable for each of the two

Where a node may make the tensor again, with the choices x_r, each flow of the backward starts there or as above:

    h_k[v] in [0, 1]     the flow to k starts at vertex v, where the tensor is made again
    h_k[v] <= sum over s with again[s] = v of x_r[s]
    sum of g_k           <= sum over s with again[s] = NOWHERE of x_r[s]

An arc that one consumer alone can use, or that costs nothing, has no w: the price stays on
f. A flow has the arcs only that lead from where the tensor may be made to where its consumer may want it.

A consumer that wants the tensor only where it is made again, such as a view that is made again with what it looks at,
has h alone: else halves of what is made once and of what is made again would serve each other's readers.

With one consumer this is as tight as a variable for every pair of vertices priced at the shortest way (it is the
transport problem). With several, x may be integral while the cheapest f are not, so w (or c) is an integer variable. It
hardly ever takes a branch. Source: Wong, "A dual ascent approach for Steiner tree
problems on a directed graph", 1984 (the multi-commodity relaxation).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..networks import NOWHERE, Consumer, Network, reached
from ..problem import INFEASIBLE, Edge, IntArray, Problem


@dataclass(frozen=True, eq=False)
class Flow:
    """The way of a tensor to one consumer.

    Attributes:
        consumer: it and the vertices it wants.
        arcs: the arcs of the network that it may use, ascending.
        vertices: those that need a row, ascending: ends of the arcs and ends of the way.
        priced: per arc of `arcs` what is paid on f, or on o.
        shared: positions in `arcs` of those that have a w or c.
        links: per entry of `shared` the position of its w or c among those of the stage.
    """

    consumer: Consumer
    arcs: IntArray
    vertices: IntArray
    priced: IntArray
    shared: IntArray
    links: IntArray


@dataclass(frozen=True, eq=False)
class Stage:
    """Consumers who pay arcs together: those of one phase, or of both where copies are kept.

    shared: the arcs that have a w or c, ascending.
    """

    flows: tuple[Flow, ...]
    shared: IntArray

    @property
    def of_two(self) -> bool:
        """Whether there are two flows: a part in common and one apart for each, not a w over both."""
        return len(self.flows) == 2


class ReadAgain:
    """Which consumers want a tensor only if it is made again, as the edges of a problem have it."""

    def __init__(self, problem: Problem) -> None:
        self._edges: dict[tuple[int, int], list[Edge]] = defaultdict(list)
        for edge in problem.edges:
            self._edges[edge.u, edge.v].append(edge)
        self._known: dict[tuple[int, int, int, int], bool] = {}

    def by(self, network: Network, consumer: Consumer) -> bool:
        """Whether a consumer of a network is one of them."""
        again = network.again
        if again is None:
            return False
        key = again.node, id(again.wants), consumer.node, id(consumer.wants)
        if key not in self._known:
            self._known[key] = self._is(again, consumer)
        return self._known[key]

    def _is(self, again: Consumer, consumer: Consumer) -> bool:
        once, wanted = again.wants == NOWHERE, consumer.wants != NOWHERE
        if consumer.node == again.node:
            return not np.any(once & wanted)
        return any(
            bool((_pairs(edge, again.node)[np.ix_(once, wanted)] >= INFEASIBLE).all())
            for ends in ((again.node, consumer.node), (consumer.node, again.node))
            for edge in self._edges[ends]
        )


def _pairs(edge: Edge, node: int) -> IntArray:
    """The price of each pair of strategies of an edge, those of a node first."""
    prices = edge.costs[np.ix_(edge.rows, edge.cols)]
    return prices if edge.u == node else prices.T


def stages(network: Network, *, apart: bool) -> Iterator[Stage]:
    """What the program of the network consists of; two stages, forward and backward, where the phases are apart."""
    if network.kept and not apart:
        yield _stage(network, network.consumers)
    else:
        yield from (_stage(network, consumers) for consumers in (network.forward, network.backward))


def _stage(network: Network, consumers: tuple[Consumer, ...]) -> Stage:
    distinct = list({(node, id(wants)): Consumer(node, wants) for node, wants in consumers}.values())
    made = network.sources if consumers is network.backward else network.makes
    there = reached(network.vertices, network.tails, network.heads, made)
    ways = [_way(network, there, consumer.somewhere) for consumer in distinct]
    uses = np.bincount(np.concatenate([network.tails[:0], *ways]), minlength=len(network.costs))
    shared = np.flatnonzero((uses > 1) & (network.costs > 0))
    flows = (
        _flow(network, made, consumer, arcs, shared, of_two=len(distinct) == 2)
        for consumer, arcs in zip(distinct, ways, strict=True)
    )
    return Stage(tuple(flows), shared)


def _way(network: Network, there: np.ndarray[tuple[int], np.dtype[np.bool_]], wants: IntArray) -> IntArray:
    needed = reached(network.vertices, network.heads, network.tails, wants)
    return np.flatnonzero(there[network.tails] & needed[network.heads])


def _flow(
    network: Network, made: IntArray, consumer: Consumer, arcs: IntArray, shared: IntArray, *, of_two: bool
) -> Flow:
    ends = made, consumer.somewhere, network.tails[arcs], network.heads[arcs]
    together = np.flatnonzero(np.isin(arcs, shared, assume_unique=True))
    priced = network.costs[arcs].copy()
    if not of_two:
        priced[together] = 0
    links = np.searchsorted(shared, arcs[together])
    return Flow(consumer, arcs, np.unique(np.concatenate(ends)), priced, together, links)
