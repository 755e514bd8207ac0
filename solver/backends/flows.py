"""A network in the integer program: from the producer's vertex a flow to every consumer, and what they share paid once.

For consumer k with the choices x_k, and the producer's x_u:

    f_k[a] in [0, 1]     what flows over arc a to consumer k
    w[a] >= f_k[a]       arc a is used, by whichever consumer; 1 or 0
    for every vertex l:  sum over s with makes[s] = l of x_u[s]  +  sum of f_k into l
                       = sum of f_k out of l  +  sum over s with wants_k[s] = l of x_k[s]
    price                sum of costs[a] w[a]

Where copies are kept one set of w serves both phases, since the backward may start from all that the forward reached;
else each phase has its own. An arc that one consumer alone can use, or that costs nothing, has no w: the price stays on
f. A flow has the arcs only that lead from where the tensor may be made to where its consumer may want it.

With one consumer this is as tight as a variable for every pair of vertices priced at the shortest way (it is the
transport problem). With several, x may be integral while the cheapest f and w are not, so w is an integer variable. It
hardly ever takes a branch. Source: Wong, "A dual ascent approach for Steiner tree
problems on a directed graph", 1984 (the multi-commodity relaxation).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..networks import Consumer, Network, reached
from ..problem import IntArray


@dataclass(frozen=True, eq=False)
class Flow:
    """The way of a tensor to one consumer.

    Attributes:
        consumer: it and the vertices it wants.
        arcs: the arcs of the network that it may use, ascending.
        vertices: those that need a row, ascending: ends of the arcs and ends of the way.
        priced: per arc of `arcs` what is paid on f.
        shared: positions in `arcs` of those that are paid on w.
        links: per entry of `shared` the position of its w among those of the stage.
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

    shared: the arcs that have a w, ascending.
    """

    flows: tuple[Flow, ...]
    shared: IntArray


def stages(network: Network) -> Iterator[Stage]:
    """What the program of the network consists of."""
    if network.kept:
        yield _stage(network, network.consumers)
    else:
        yield from (_stage(network, consumers) for consumers in (network.forward, network.backward))


def _stage(network: Network, consumers: tuple[Consumer, ...]) -> Stage:
    distinct = list({(node, id(wants)): Consumer(node, wants) for node, wants in consumers}.values())
    there = reached(network.vertices, network.tails, network.heads, network.makes)
    ways = [_way(network, there, consumer.wants) for consumer in distinct]
    uses = np.bincount(np.concatenate([network.tails[:0], *ways]), minlength=len(network.costs))
    shared = np.flatnonzero((uses > 1) & (network.costs > 0))
    flows = (_flow(network, consumer, arcs, shared) for consumer, arcs in zip(distinct, ways, strict=True))
    return Stage(tuple(flows), shared)


def _way(network: Network, there: np.ndarray[tuple[int], np.dtype[np.bool_]], wants: IntArray) -> IntArray:
    needed = reached(network.vertices, network.heads, network.tails, wants)
    return np.flatnonzero(there[network.tails] & needed[network.heads])


def _flow(network: Network, consumer: Consumer, arcs: IntArray, shared: IntArray) -> Flow:
    ends = network.makes, consumer.wants, network.tails[arcs], network.heads[arcs]
    together = np.flatnonzero(np.isin(arcs, shared, assume_unique=True))
    priced = network.costs[arcs].copy()
    priced[together] = 0
    links = np.searchsorted(shared, arcs[together])
    return Flow(consumer, arcs, np.unique(np.concatenate(ends)), priced, together, links)
