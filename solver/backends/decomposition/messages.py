"""A lower bound on the pairwise energy by sequential tree-reweighted message passing (TRW-S).

A pass visits the colours in order, or in reverse. At a node i of the colour at hand, with theta_i = costs_i + all
messages to i, its least entry goes to the bound; what remains is dealt out in equal parts to the n_i edges that lead on
in the direction of the pass, gamma_i = 1 / max(n_i forward, n_i backward) each:

    message_ij[m]  =  min over l of  gamma_i theta_i[l] - message_ji[l] + e_ij[l, m]

and the least entry of every new message goes to the bound too. The bound of one pass is valid whatever the messages
were before it: the messages of earlier passes cancel between the two ends of an edge, every amount that the pass
takes out of a node or an edge is its least, and what is left, (1 - n_i gamma_i) theta_i, is not negative. Source:
Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", 2006, section 3.
"""

from __future__ import annotations

import numpy as np

from .pairwise import FloatArray, IntArray, Pairwise


class Messages:
    """The messages of an energy whose node costs may change between passes."""

    def __init__(self, energy: Pairwise) -> None:
        self.energy = energy
        self.costs = energy.costs.copy()
        self.theta = energy.costs.copy()
        self.to_u = [np.zeros((batch.u.classes, batch.costs.shape[2])) for batch in energy.batches]
        self.to_v = [np.zeros((batch.v.classes, batch.costs.shape[2])) for batch in energy.batches]
        self.lengths = np.diff(energy.first)
        self.gamma = np.repeat(_gammas(energy), self.lengths)
        colors = len(energy.color_starts) - 1
        self.forward: list[list[int]] = [[] for _ in range(colors)]
        self.backward: list[list[int]] = [[] for _ in range(colors)]
        for index, batch in enumerate(energy.batches):
            self.forward[batch.colors[0]].append(index)
            self.backward[batch.colors[1]].append(index)

    def set_costs(self, costs: FloatArray) -> None:
        """Replaces the node costs; the messages stay."""
        self.theta += costs - self.costs
        self.costs = costs

    def sweep(self) -> float:
        """A pass forward and one backward; the bound of the latter."""
        for color in range(len(self.forward)):
            self._visit(color, forward=True)
        return sum((self._visit(color, forward=False) for color in reversed(range(len(self.backward)))), 0.0)

    def least(self) -> FloatArray:
        """(N,) the least theta of every node."""
        least: FloatArray = np.minimum.reduceat(self.theta, self.energy.first[:-1])
        return least

    def slack(self, chosen: IntArray) -> FloatArray:
        """(N,) how far the assignment is above the least of theta at each node and of the edges around it."""
        slack: FloatArray = self.theta[self.energy.first[:-1] + chosen] - self.least()
        for batch, to_u, to_v in zip(self.energy.batches, self.to_u, self.to_v, strict=True):
            left = batch.costs - to_u[:, None, :] - to_v[None, :, :]
            b = np.arange(left.shape[2])
            above = left[batch.u.chosen_class(chosen), batch.v.chosen_class(chosen), b] - left.min(axis=(0, 1))
            np.add.at(slack, batch.u.nodes, above)
            np.add.at(slack, batch.v.nodes, above)
        return slack

    def _visit(self, color: int, *, forward: bool) -> float:
        lo, hi = self.energy.color_starts[color : color + 2]
        first = self.energy.first[lo:hi]
        here = slice(int(first[0]), int(self.energy.first[hi]))
        least = np.minimum.reduceat(self.theta[here], first - first[0])
        bound = float(least.sum())
        part = np.zeros_like(self.theta)
        part[here] = (self.theta[here] - np.repeat(least, self.lengths[lo:hi])) * self.gamma[here]
        for index in self.forward[color] if forward else self.backward[color]:
            bound += self._send(index, part, forward=forward)
        return bound

    def _send(self, index: int, part: FloatArray, *, forward: bool) -> float:
        # The formula of the module's docstring for a batch of edges: `given` is gamma theta of the sender less the
        # message that came from the other end, and per column the least over the rows is the new message. Its least
        # entry goes to the bound; the receiver's theta gets the new message in place of the old one (`kept`).
        batch = self.energy.batches[index]
        if forward:
            given = batch.u.least(part) - self.to_u[index]
            message = (given[:, None, :] + batch.costs).min(axis=0)
            side, kept = batch.v, self.to_v
        else:
            given = batch.v.least(part) - self.to_v[index]
            message = (given[None, :, :] + batch.costs).min(axis=1)
            side, kept = batch.u, self.to_u
        least = message.min(axis=0)
        message -= least
        side.add(self.theta, message - kept[index])
        kept[index] = message
        return float(least.sum())


def _gammas(energy: Pairwise) -> FloatArray:
    nodes = len(energy.order)
    onward, back = np.zeros(nodes), np.zeros(nodes)
    for batch in energy.batches:
        np.add.at(onward, batch.u.nodes, 1)
        np.add.at(back, batch.v.nodes, 1)
    return 1.0 / np.maximum(1, np.maximum(onward, back))
