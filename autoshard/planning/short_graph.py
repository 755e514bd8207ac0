"""A graph with fewer layers: those that are the same again and again are left out, but for a few at both ends.

Layers are the same where operators, arguments and shapes are the same but for the number of the layer, and so is what
is decided of them, as far as it is; what one takes of another it takes of one as many layers away. A pattern of several
layers counts, too: every second one a mixture of experts. Whatever is not the same leaves the graph as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from ..capture import CapturedGraph, Node, Ref, map_refs
from ..plans import PHASES, Phase
from ..plans.left_out import LeftOut, Stack

MOST_PERIOD = 6
"""The longest pattern of layers that is looked for: five with a window of attention and one without, as Gemma 3 has."""

REACH = 2
"""How many layers away things are looked for at first: a gradient is reduced while those of the next two are made."""

FEWEST_LEFT_OUT = 4
"""How many layers are to be saved, so that it is worth looking."""

MOST_STACKS = 4
"""How many stacks of layers are looked at: those with most modules."""


class NotPeriodicError(Exception):
    """Layers are not the same again and again."""


@dataclass(frozen=True, eq=False)
class ShortGraph:
    """A graph without some layers of the ``longer`` one. ``origin`` has for every node of that the one here that it is
    as: itself, or that of another layer.
    """

    longer: CapturedGraph
    graph: CapturedGraph
    out: LeftOut
    origin: tuple[int, ...]


def short_graphs(graph: CapturedGraph) -> list[ShortGraph]:
    """A graph shortened by one stack of layers, that by another, and so on; nothing where no layers are the same."""
    found: list[ShortGraph] = []
    for path in stacks(graph):
        short = _without_layers(graph, Stack(path))
        if short is not None:
            graph = short.graph
            found.append(short)
    return found


def times_of(shorts: Sequence[ShortGraph]) -> list[int]:
    """How many nodes of the whole graph each node of the last one stands for; empty where none is shortened."""
    times = [1] * len(shorts[0].longer.nodes) if shorts else []
    for short in shorts:
        found = [0] * len(short.graph.nodes)
        for here, count in zip(short.origin, times, strict=True):
            found[here] += count
        times = found
    return times


def stacks(graph: CapturedGraph) -> list[str]:
    """The paths of lists of modules that may have enough layers, those with most modules first."""
    if graph.micro_batches > 1:
        return []
    numbers: dict[str, set[int]] = defaultdict(set)
    modules: dict[str, int] = defaultdict(int)
    for module in {node.name.partition("/")[0] for _, node in graph.of_kind("operator")}:
        parts = module.split(".")
        for k, part in enumerate(parts):
            if part.isdecimal():
                path = ".".join(parts[:k])
                numbers[path].add(int(part))
                modules[path] += 1
    enough = [path for path, each in numbers.items() if len(each) >= fewest(1, REACH)]
    return sorted(enough, key=lambda path: (-modules[path], path))[:MOST_STACKS]


def fewest(period: int, reach: int) -> int:
    """How many layers that are the same are worth looking at."""
    return 2 * (period + reach) + max(FEWEST_LEFT_OUT, period)


def _without_layers(graph: CapturedGraph, stack: Stack) -> ShortGraph | None:
    try:
        layers = Layers(graph, stack)
        first, end, period = layers.longest_run()
        reach = max(layers.reach(first, end), REACH)
        if end - first >= fewest(period, reach):
            return layers.without(first, end, period, reach)
    except NotPeriodicError:
        pass
    return None


class Layers:
    """The layers of a stack as they are in a graph; what is decided of them, a subclass says.

    Raises:
        NotPeriodicError: modules are named so that layers do not stand together in the order of names.
    """

    def __init__(self, graph: CapturedGraph, stack: Stack) -> None:
        self.graph, self.stack = graph, stack
        self.members: dict[int, list[int]] = defaultdict(list)
        self.places: list[tuple[int, int] | None] = []
        """Of every node the layer, and its place there."""
        for i, node in enumerate(graph.nodes):
            where = stack.where(node.name) if node.kind in ("parameter", "buffer", "operator") else None
            self.places.append(where and (where[0], len(self.members[where[0]])))
            if where is not None:
                self.members[where[0]].append(i)
        if stack.is_odd:
            raise NotPeriodicError
        self._given = dict(graph.gradients), dict(graph.mutations)

    def longest_run(self) -> tuple[int, int, int]:
        """From where and up to where layers are as those a period before them, and that period.

        Raises:
            NotPeriodicError: there is no such run that is long enough.
        """
        last = max(self.members, default=-1)
        for period in range(1, MOST_PERIOD + 1):
            alike = (k for k in range(period, last + 1) if self._is_alike(k - period, k))
            runs = ([k for _, k in run] for _, run in groupby(enumerate(alike), lambda each: each[1] - each[0]))
            found = max(runs, key=len, default=[])
            if found and found[-1] + 1 - (found[0] - period) >= fewest(period, REACH):
                return found[0] - period, found[-1] + 1, period
        raise NotPeriodicError

    def reach(self, first: int, end: int) -> int:
        """How many layers away layers of a run take things from, or give them to, at most."""
        run = range(first, min(end, first + MOST_PERIOD))
        return max(abs(away) for layer in run for away in self._met(layer))

    def without(self, first: int, end: int, period: int, reach: int) -> ShortGraph:
        """The graph without some layers of a run.

        Raises:
            NotPeriodicError: what is of no layer, or of one that is not as the others, has to do with those left out.
        """
        cut = first + period + reach
        count = (end - cut - period - reach) // period * period
        return _Writer(self, LeftOut(self.stack, first, end, cut, count, period, reach)).written()

    def _met(self, layer: int) -> Iterator[int]:
        """How far away the layers are that one has to do with."""
        yield 0
        for i in self.members[layer]:
            for ref in self.graph.nodes[i].inputs:
                place = self.places[ref.node]
                if place is not None:
                    yield place[0] - layer

    def _is_alike(self, one: int, other: int) -> bool:
        mine, its = self.members.get(one, ()), self.members.get(other, ())
        if not mine or len(mine) != len(its):
            return False
        nodes = self.graph.nodes
        return all(self._is_alike_node(nodes[a], nodes[b], one, other) for a, b in zip(mine, its))

    def _is_alike_node(self, a: Node, b: Node, one: int, other: int) -> bool:
        if a.kind != b.kind or a.phase != b.phase or a.op is not b.op or a.outputs != b.outputs or a.orders != b.orders:
            return False
        if self.stack.where(a.name)[1] != self.stack.where(b.name)[1]:  # type: ignore[index]
            return False
        if a.kind == "operator":
            return self._is_same(a.args, b.args, one, other) and self._is_same(a.kwargs, b.kwargs, one, other)
        if (a.name in self.graph.replaced) != (b.name in self.graph.replaced):
            return False
        return all(self._is_same(given.get(a.name), given.get(b.name), one, other) for given in self._given)

    def _is_same(self, a: Any, b: Any, one: int, other: int) -> bool:
        """Whether arguments are the same, of the layers of these numbers."""
        if type(a) is not type(b):
            return False
        if isinstance(a, Ref):
            place, its = self.places[a.node], self.places[b.node]
            if a.output != b.output or place is None or its is None:
                return bool(a == b)
            return (place[0] - one, place[1]) == (its[0] - other, its[1])
        if isinstance(a, tuple):
            return len(a) == len(b) and all(self._is_same(x, y, one, other) for x, y in zip(a, b))
        return bool(a == b)


class _Writer:
    """Writes a graph without some layers of a run."""

    def __init__(self, layers: Layers, out: LeftOut) -> None:
        self._layers, self._graph, self._out = layers, layers.graph, out
        self._left_out = out.layers
        self._missing = {i for layer in self._left_out for i in layers.members[layer]}
        count = len(self._graph.nodes)
        self._numbers = {i: k for k, i in enumerate(i for i in range(count) if i not in self._missing)}

    def written(self) -> ShortGraph:
        graph = self._graph
        self._check_given()
        for phase in PHASES:
            self._check_order(phase)
        short = replace(
            graph,
            nodes=tuple(self._node(i) for i in self._numbers),
            outputs=tuple(ref and self._ref(ref, None) for ref in graph.outputs),
            gradients=self._given(graph.gradients),
            mutations=self._given(graph.mutations),
        )
        return ShortGraph(graph, short, self._out, tuple(self._origin()))

    def _origin(self) -> list[int]:
        found = [self._numbers.get(i, -1) for i in range(len(self._graph.nodes))]
        members = self._layers.members
        for layer in self._left_out:
            for i, other in zip(members[layer], members[self._out.like(layer)], strict=True):
                found[i] = self._numbers[other]
        return found

    def _node(self, index: int) -> Node:
        node, place = self._graph.nodes[index], self._layers.places[index]
        if not node.inputs:
            return node
        args, kwargs = (map_refs(each, lambda ref: self._ref(ref, place)) for each in (node.args, node.kwargs))
        return replace(node, args=args, kwargs=kwargs)

    def _ref(self, ref: Ref, reader: tuple[int, int] | None) -> Ref:
        """A tensor as the shortened step numbers it, for a reader in a layer, or in none."""
        place, index, out = self._layers.places[ref.node], ref.node, self._out
        if place is not None and reader is not None and out.first <= reader[0] < out.end:
            index = self._layers.members[out.beside(place[0], reader[0])][place[1]]
        if index in self._missing:
            raise NotPeriodicError
        return Ref(self._numbers[index], ref.output)

    def _given(self, entries: Iterable[tuple[str, Ref]]) -> tuple[tuple[str, Ref], ...]:
        """Gradients of parameters, or new values of buffers, that are left."""
        found = []
        for name, ref in entries:
            where = self._out.stack.where(name)
            if where is None or where[0] not in self._left_out:
                found.append((name, self._ref(ref, where and (where[0], 0))))
        return tuple(found)

    def _check_given(self) -> None:
        """Checks that the layers left out give gradients alone, each made by an operator of the backward."""
        nodes, out = self._graph.nodes, {self._graph.nodes[i].name for i in self._missing}
        made = (nodes[ref.node] for name, ref in self._graph.gradients if name in out)
        if any(node.kind != "operator" or node.phase != "backward" for node in made):
            raise NotPeriodicError
        if not out.isdisjoint(name for name, _ in self._graph.mutations):
            raise NotPeriodicError

    def _check_order(self, phase: Phase) -> None:
        """Checks that the operators of the layers left out, and of those beside them, stand layer behind layer, in each
        in the same order; all of them at once, or some of every layer before the others.
        """
        places, left_out = self._layers.places, self._left_out
        period, reach = self._out.period, self._out.reach
        operators = [i for i, node in self._graph.of_kind("operator") if node.phase == phase]
        groups = [(layer, list(each)) for layer, each in groupby(operators, lambda i: (places[i] or (None,))[0])]
        low, high, behind = left_out.start - period - reach, left_out.stop + reach, left_out.stop
        k = 0
        while k < len(groups):
            layer = groups[k][0]
            if layer is None or layer not in left_out:
                k += 1
                continue
            ascends = layer == left_out.start
            start = k - (left_out.start - low) if ascends else k - (high + 1 - behind)
            chain = groups[max(start, 0) : max(start, 0) + high - low + 1]
            wanted = range(low, high + 1) if ascends else range(high, low - 1, -1)
            if start < 0 or [number for number, _ in chain] != list(wanted):
                raise NotPeriodicError
            stand = {number: [places[i] and places[i][1] for i in each] for number, each in chain}  # type: ignore[index]
            if any(stand[number] != stand[number - period] for number in range(low + period, high + 1)):
                raise NotPeriodicError
            k = start + len(chain)
