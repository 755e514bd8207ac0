"""A lower bound of a problem of networks by dual ascent, and what each strategy and each arc costs at least.

A message is a price at a vertex of an end of a network, paid there by the network and got by the node whose strategy
puts the end there. Messages cancel in every assignment, so for any messages at all

    sum over nodes of the least of (costs + messages)  +  sum over networks of the least of (routes - messages)

is a lower bound. The ascent visits nodes in their order, to and fro. A visit moves all that the networks of a node know
of it into its costs (the least cost of routes for each vertex that it may choose, :mod:`solver.backends.arborescence`),
and then deals what its strategies cost above the cheapest to the networks that lead on, in equal parts. Neither lowers
the bound. Where it ends it is mostly the optimum of the relaxation: on Llama-3-8B on 2x2x4x4 (1.8 million arcs) it ends
at 371.597 ms after 25 sweeps and 2.4 CPU seconds, and the optimum is that, for which HiGHS takes a minute.
Source: Kolmogorov, "A new look at reweighted message passing", 2015 (SRMP, of which this is the case that every factor
has the separators of its ends).

At a visit what a strategy costs above the cheapest, added to the bound, is no more than what any assignment with that
strategy costs; likewise for arcs. What costs more than a known assignment does can be dropped.
Source: reduced-cost fixing; Dantzig, Fulkerson and Johnson, 1954.

A network of many consumers is split: each part has some of the consumers and its share of the price of every arc.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..networks import BoolArray, Consumer, Network
from ..problem import INFEASIBLE, IntArray, Problem
from .arborescence import FAR, Arborescence, FloatArray, Ways

MOST_CONSUMERS = 3
"""Of one arborescence, whose tables are 2^k. With 1, 2, 3, 4 and 8 consumers the bound of Llama-3-8B on 8x8 ends at
391.3, 419.5, 423.795, 423.795 and 423.795 ms, the last being the optimum.
"""

MOST_SWEEPS = 400
GAIN = 1e-6
"""What is nothing: where a pair of sweeps gains no more than this part of the bound, the ascent is at its end."""

ROUNDING = 1e-9
"""Relative error of sums in double precision, assumed, with room: 400 sweeps add up to 10^5 numbers of 53 bits."""


@dataclass(frozen=True, eq=False)
class _Factor:
    """A network, or a part of it, in the ascent.

    Attributes:
        number: of the network.
        costs: of its arcs; of a part its share.
        ends: who makes the tensor, and who wants it.
    """

    number: int
    costs: FloatArray
    routes: Arborescence
    ends: tuple[Consumer, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(node for node, _ in self.ends)


class _End:
    """One end of a factor: the vertex that each strategy left to its node chooses, and the messages."""

    def __init__(self, factor: _Factor, number: int) -> None:
        self.factor, self._number = factor, number
        self._vertices, self._at = np.unique(factor.ends[number].wants, return_inverse=True)
        self._messages = np.zeros(len(self._vertices))
        self._set()

    def collect(self) -> FloatArray:
        """Moves all that the network knows into its messages; what each strategy of the node gets for it."""
        known = self.factor.routes.least(self._number)[self._vertices] - self._messages
        self._messages = self._messages + known
        self._set()
        return known[self._at]

    def deal(self, slack: FloatArray, share: float) -> FloatArray:
        """Deals the network a share of the least slack at each vertex; what each strategy of the node has given."""
        dealt = np.full(len(self._vertices), FAR)
        np.minimum.at(dealt, self._at, slack)
        dealt *= share
        self._messages = self._messages - dealt
        self._set()
        return dealt[self._at]

    def keep(self, kept: BoolArray) -> None:
        """Leaves only some of the node's strategies."""
        places, self._at = np.unique(self._at[kept], return_inverse=True)
        self._vertices, self._messages = self._vertices[places], self._messages[places]
        self._set()

    def through(self, network: Network, slack: FloatArray) -> FloatArray:
        """Per arc what the network costs at least if it is used, with all slack of the node."""
        before = self._messages
        self.deal(slack, 1.0)
        found = self.factor.routes.through(network.tails, network.heads, self.factor.costs)
        self._messages = before
        self._set()
        return found

    def _set(self) -> None:
        self.factor.routes.price(self._number, self._vertices, -self._messages)


class NetworkAscent:
    """The ascent on a problem whose costs stand on nodes and in networks alone.

    Attributes:
        cutoff: what costs more is of no interest, and its strategies are dropped on the way.
        is_impossible: a node has no strategy left: nothing costs as little as the cutoff.
    """

    def __init__(self, problem: Problem, cutoff: float = FAR) -> None:
        self.cutoff, self.is_impossible = cutoff, False
        self._problem = problem
        self._costs = [np.where(node.costs < INFEASIBLE, node.costs, FAR) for node in problem.nodes]
        self._left = [np.arange(len(node.costs)) for node in problem.nodes]
        self._least = np.array([float(node.costs.min()) for node in problem.nodes])
        self._at_least = [np.full(len(node.costs), -FAR) for node in problem.nodes]
        self._factors = list(_factors(problem))
        self._ends: list[list[_End]] = [[] for _ in problem.nodes]
        for factor in self._factors:
            for number, node in enumerate(factor.nodes):
                self._ends[node].append(_End(factor, number))
        self._later = [[end for end in ends if max(end.factor.nodes) > k] for k, ends in enumerate(self._ends)]
        self._earlier = [[end for end in ends if min(end.factor.nodes) < k] for k, ends in enumerate(self._ends)]

    @property
    def bound(self) -> float:
        """No assignment costs less, but for rounding."""
        return self._problem.offset + float(np.add.reduce(self._least))

    def run(self, ended: Callable[[float], bool], gain: float = GAIN) -> None:
        """Sweeps to and fro until that gains nothing. May be called again, to go on.

        Args:
            ended: is told the bound after every pair of sweeps, and says whether to stop.
            gain: the ascent ends where a pair of sweeps gains no more than this part of the bound.
        """
        before = -FAR
        for _ in range(MOST_SWEEPS // 2):
            self._sweep(forward=True)
            self._sweep(forward=False)
            if self.is_impossible or ended(self.bound) or self.bound - before <= gain * abs(self.bound):
                return
            before = self.bound

    def strategies(self, limit: float) -> list[IntArray]:
        """Of every node the strategies that may be part of an assignment that costs no more than the limit."""
        return [np.flatnonzero(at_least <= above(limit)) for at_least in self._at_least]

    def arcs(self) -> list[FloatArray]:
        """For every network what an assignment that uses an arc costs at least; FAR where none does."""
        found = [np.full(len(network.costs), FAR) for network in self._problem.networks]
        parts = {id(factor): np.full(len(factor.costs), -FAR) for factor in self._factors}
        self._sweep(forward=True, through=parts)
        for factor in self._factors:
            np.minimum(found[factor.number], parts[id(factor)], out=found[factor.number])
        return found

    def _sweep(self, *, forward: bool, through: dict[int, FloatArray] | None = None) -> None:
        order = range(len(self._costs))
        for node in order if forward else reversed(order):
            self._visit(node, forward, through)
            if self.is_impossible:
                return

    def _visit(self, node: int, forward: bool, through: dict[int, FloatArray] | None) -> None:
        costs, ends = self._costs[node], self._ends[node]
        for end in ends:
            costs = costs + end.collect()
        least = float(np.minimum.reduce(costs))
        if least >= FAR / 2:
            self.is_impossible = True
            return
        self._least[node] = least
        slack = costs - least
        at_least = np.where(slack < FAR / 2, slack + self.bound, FAR)
        known, left = self._at_least[node], self._left[node]
        known[left] = np.maximum(known[left], at_least)
        kept = at_least <= min(above(self.cutoff), FAR / 2)
        count = np.count_nonzero(kept)
        if not count:
            self.is_impossible = True
            return
        if count < len(kept):
            known[left[~kept]] = FAR
            costs, slack, self._left[node] = costs[kept], slack[kept], left[kept]
            for end in ends:
                end.keep(kept)
        if through is not None:
            for end in ends:
                network, found = self._problem.networks[end.factor.number], through[id(end.factor)]
                np.maximum(found, end.through(network, slack) + self.bound, out=found)
        later, earlier = self._later[node], self._earlier[node]
        for end in later if forward else earlier:
            costs = costs - end.deal(slack, 1 / max(len(later), len(earlier)))
        self._costs[node] = costs


def above(limit: float) -> float:
    """What is no more than a limit, whatever rounding did to it."""
    return limit + ROUNDING * abs(limit)


def _factors(problem: Problem) -> Iterator[_Factor]:
    """The networks in the ascent; those with equal arcs share their ways."""
    known: dict[tuple[int, int, int, int], tuple[FloatArray, Ways, Ways]] = {}
    for number, network in enumerate(problem.networks):
        for consumers in _parts(network):
            parts = len(consumers)
            key = id(network.tails), id(network.heads), id(network.costs), parts
            if key not in known:
                costs = network.costs / parts
                forwards = Ways(network.tails, network.heads, costs)
                known[key] = costs, forwards, Ways(network.heads, network.tails, costs)
            costs, forwards, backwards = known[key]
            for part in consumers:
                ends = (Consumer(network.producer, network.makes), *part)
                routes = Arborescence(network.vertices, forwards, backwards, len(ends))
                yield _Factor(number, costs, routes, ends)


def _parts(network: Network) -> Iterator[list[list[Consumer]]]:
    """The consumers who pay arcs together, in as few parts as can be: those of both phases where copies are kept."""
    for consumers in (network.consumers,) if network.kept else (network.forward, network.backward):
        distinct = list({(node, id(wants)): Consumer(node, wants) for node, wants in consumers}.values())
        count = -(-len(distinct) // MOST_CONSUMERS)
        if count:
            yield [distinct[k::count] for k in range(count)]
