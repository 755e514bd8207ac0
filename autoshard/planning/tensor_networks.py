"""Redistributions in the program: for every tensor the network of its layouts and the single steps between them.

See :mod:`solver.networks` for what a network costs. Tensors of equal shapes share their arrays, so that networks of
identical layers are recognised as equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from solver import NOWHERE, Consumer, Network, Routes

from ..capture import CapturedGraph, Ref
from ..layout import Layout, Placement
from ..micro_batches import redistribution_runs
from ..redistribution import Banned
from ..redistribution.paths import Steps
from ..strategies import Strategy
from .pricing import Prices, further_placements

HELD = -1
"""The position of a consumer that wants a tensor in the layout it holds it in: a gradient, or a result."""


class Demand(NamedTuple):
    """A tensor and those who want it in one phase: (solver node, position among its tensor arguments, or HELD).

    ``banned`` are the steps that constraints keep from moving it; where it is ``remade``, they have the backward make
    copies of its own.
    """

    ref: Ref
    phase: str
    consumers: tuple[tuple[int, int], ...]
    banned: Banned = frozenset()
    remade: bool = False


@dataclass(frozen=True, eq=False)
class TensorNetwork:
    """The network of one tensor: its vertices are ``layouts``, in this order; ``demands`` are of one phase each.

    ``again`` is the operator that may make it again, if there is one.
    """

    ref: Ref
    layouts: tuple[Layout, ...]
    demands: tuple[Demand, ...]
    network: Network
    again: int | None = None

    def ends(self) -> Iterator[tuple[Layout, Layout]]:
        """The layouts that each arc of the network joins."""
        for tail, head in zip(self.network.tails.tolist(), self.network.heads.tolist()):
            yield self.layouts[tail], self.layouts[head]

    def tree(self, arcs: Sequence[int]) -> dict[int, int]:
        """For every vertex that these arcs lead to, the one before it."""
        tails, heads = (ends[list(arcs)].tolist() for ends in (self.network.tails, self.network.heads))
        return dict(zip(heads, tails, strict=True))


def networks_of(
    graph: CapturedGraph,
    prices: Prices,
    strategies: Sequence[tuple[Strategy, ...]],
    demands: Sequence[Demand],
    *,
    keep_copies: bool,
    seconds: Mapping[int, int] = {},
    times: Sequence[int] = (),
) -> Iterator[TensorNetwork]:
    """The networks of all tensors that somebody wants, in the order of the demands.

    Args:
        times: how many nodes of a whole step each node stands for; empty where that is itself alone.
        seconds: of the operators that make tensors of others again, which others: these choose for both.
    """
    again = {first: second for second, first in seconds.items()}
    by_tensor: dict[Ref, list[Demand]] = {}
    for demand in demands:
        by_tensor.setdefault(demand.ref, []).append(demand)
    places = _Places(strategies, seconds)
    known: dict[object, TensorNetwork] = {}
    for ref, wanting in by_tensor.items():
        forward: list[tuple[int, int]] = []
        backward: list[tuple[int, int]] = []
        for demand in wanting:
            (forward if demand.phase == "forward" else backward).extend(demand.consumers)
        second = again.get(ref.node) if backward else None
        ends = [(ref.node, None), *forward, *backward]
        if second is not None:
            ends.append((second, None))
        meta, banned, together = graph.meta(ref), wanting[0].banned, prices.together(ref)
        runs = _runs(graph, ref, wanting) * (times[ref.node] if times else 1)
        kept = keep_copies and not any(demand.remade for demand in wanting)
        marks = tuple([places.mark(node, position) for node, position in ends])
        key = meta, ref.output, banned, together, runs, kept, len(forward), second is None, marks
        name = graph.tensor_name(ref)
        if key in known:
            like = known[key]
            network = like.network.of_tensor(name, [places.chooser(node) for node, _ in ends])
            yield TensorNetwork(ref, like.layouts, tuple(wanting), network, second)
            continue
        wanted = ends if second is None else ends[:-1]
        further = frozenset().union(*(places.further(node, position, ref.output) for node, position in wanted))
        steps = prices.steps(meta, further, banned, together)
        producer = places.end(ref.node, None, ref.output, steps)
        network = Network(
            name=name,
            vertices=len(steps.layouts),
            tails=steps.tails,
            heads=steps.heads,
            costs=places.costs(steps, runs),
            producer=ref.node,
            makes=producer.wants,
            forward=tuple(places.end(node, position, 0, steps) for node, position in forward),
            backward=tuple(places.end(node, position, 0, steps) for node, position in backward),
            kept=kept,
            again=None if second is None else places.end(second, None, ref.output, steps),
        )
        known[key] = TensorNetwork(ref, steps.layouts, tuple(wanting), network, second)
        yield known[key]


class _Places:
    """At which vertices of a tensor's network each choice of a node makes it or wants it; arrays made once."""

    def __init__(self, strategies: Sequence[tuple[Strategy, ...]], seconds: Mapping[int, int]) -> None:
        self._strategies, self._seconds, self._twice = strategies, seconds, frozenset(seconds.values())
        self._costs: dict[tuple[int, int], np.ndarray] = {}
        self._vertices: dict[int, dict[Layout, int]] = {}
        self._layouts: dict[object, list[Layout]] = {}
        self._further: dict[object, frozenset[Placement]] = {}
        self._places: dict[object, np.ndarray] = {}

    def chooser(self, node: int) -> int:
        """Who chooses for a node."""
        return self._seconds.get(node, node)

    def mark(self, node: int, position: int | None) -> Hashable:
        """What an end has in common with those of other networks that make or want their tensors in the same way."""
        first = self.chooser(node)
        return id(self._strategies[node]), id(self._strategies[first]), position, first in self._twice, first != node

    def further(self, node: int, position: int | None, output: int) -> frozenset[Placement]:
        """The placements beside whole and cut that a tensor has under some strategy."""
        key = self._key(node, position, output)
        if key not in self._further:
            self._further[key] = further_placements(self._layouts_of(node, position, output))
        return self._further[key]

    def _layouts_of(self, node: int, position: int | None, output: int) -> list[Layout]:
        """The layout under each strategy: of the result ``output`` (position None), or of what the node wants."""
        key = self._key(node, position, output)
        if key not in self._layouts:
            self._layouts[key] = [layout_of(strategy, position, output) for strategy in self._strategies[node]]
        return self._layouts[key]

    def _key(self, node: int, position: int | None, output: int) -> tuple[int, int | None, int]:
        return id(self._strategies[node]), position, output if position is None else 0

    def end(self, node: int, position: int | None, output: int, steps: Steps) -> Consumer:
        """Who chooses for a node, and the vertex under each choice: of a second operator NOWHERE without it."""
        first = self.chooser(node)
        return Consumer(first, self._of(first, position, output, steps, first != node))

    def _of(self, node: int, position: int | None, output: int, steps: Steps, is_second: bool) -> np.ndarray:
        key = (self._key(node, position, output), id(steps), node in self._twice, is_second)
        if key not in self._places:
            if id(steps) not in self._vertices:
                self._vertices[id(steps)] = {layout: vertex for vertex, layout in enumerate(steps.layouts)}
            vertices = self._vertices[id(steps)]
            layouts = self._layouts_of(node, position, output)
            places = [vertices[layout] for layout in layouts]
            once = [NOWHERE] * len(places) if is_second else places
            self._places[key] = np.array([*once, *places] if node in self._twice else places, dtype=np.int64)
        return self._places[key]

    def costs(self, steps: Steps, runs: int) -> np.ndarray:
        """Nanoseconds of each step, taken so many times."""
        key = id(steps), runs
        if key not in self._costs:
            self._costs[key] = runs * np.rint(steps.seconds * 1e9).astype(np.int64)
        return self._costs[key]


def _runs(graph: CapturedGraph, ref: Ref, wanting: Sequence[Demand]) -> int:
    """How often in a step a tensor is taken to those who want it."""
    if graph.micro_batches == 1:
        return 1
    consumers = (node for demand in wanting for node, _ in demand.consumers if node < len(graph.nodes))
    names = (graph.nodes[node].name for node in consumers)
    return redistribution_runs(graph.tensor_name(ref), names, graph.micro_batches)


def layout_of(strategy: Strategy, position: int | None, output: int = 0) -> Layout:
    """The layout that a strategy gives the result ``output`` (position None), or that its node wants of what it reads
    at a position, or holds (HELD).
    """
    if position is None:
        layout = strategy.outputs[output]
    else:
        layout = strategy.outputs[0] if position == HELD else strategy.inputs[position]
    assert layout is not None
    return layout


def same_arcs(before: TensorNetwork, after: TensorNetwork, arcs: Sequence[int]) -> tuple[int, ...]:
    """The arcs between the same layouts in another network of the tensor.

    Raises:
        KeyError: there is none between them.
    """
    if before.network.tails is after.network.tails:
        return tuple(arcs)
    place = {ends: arc for arc, ends in enumerate(after.ends())}
    ends = list(before.ends())
    return tuple(sorted(place[ends[arc]] for arc in arcs))


class Way(NamedTuple):
    """How a tensor gets to one layout in one phase: ``path`` from the layout it is made in, of which the first
    ``shared`` steps are not taken for it alone: another way of the phase took them before, or (``kept``) the forward
    did, whose copy is kept.
    """

    path: tuple[Layout, ...]
    shared: int
    kept: bool


def ways(found: TensorNetwork, phase: str, made: Layout, wanted: Sequence[Layout], routes: Routes) -> Iterator[Way]:
    """The way to every layout that is wanted in a phase, in this order.

    Args:
        made: the layout in which the tensor is made.
        wanted: distinct layouts other than that, which the routes lead to.
        routes: of the network, without arcs that lead nowhere.
    """
    forward, backward = found.tree(routes.forward), found.tree(routes.backward)
    kept = forward if found.network.kept else {}
    first = found.layouts.index(made)
    done = {first}
    if phase == "backward":
        done |= kept.keys() - backward.keys()
    before = forward if phase == "forward" else kept | backward  # what the backward makes again it does not keep
    taken = {first}
    for layout in wanted:
        way = [found.layouts.index(layout)]
        while way[-1] != first:
            way.append(before[way[-1]])
        way.reverse()
        again, shared = (max(k for k, vertex in enumerate(way) if vertex in those) for those in (done, taken))
        taken.update(way)
        yield Way(tuple(found.layouts[vertex] for vertex in way), max(again, shared), 0 < again >= shared)
