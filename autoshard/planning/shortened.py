"""A step with fewer layers, from which one knows what the whole step does: layers that are the same again and again are
left out, but for a few at both ends.

Layers are the same where operators, arguments, shapes, layouts, redistributions and what travels in the turn of each
operator are the same but for the number of the layer; what one takes of another it takes of one as many layers away. A
pattern of several layers counts, too: every second one a mixture of experts. What writes the local programs
(:mod:`autoshard.lowering`) goes by nothing else, so that it does in all of these layers what it does in one of them.
Whatever is not the same leaves the step as it is.

    0 1 2 3 4 5 ... 76 77 78 79     of which 1 to 78 are the same
    0 1 2 3 | 76 77 78 79           what is left, where nothing reaches further than 2 layers
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from ..capture import CapturedGraph, Node, Ref, map_refs
from ..lowering import bucket_name, scheduled
from ..plans import PHASES, Phase, Redistribution, ShardingPlan
from ..plans.schedule import Bucket, Turn

MOST_PERIOD = 6
"""The longest pattern of layers that is looked for: five with a window of attention and one without, as Gemma 3 has."""

REACH = 2
"""How many layers away things are looked for at first: a gradient is reduced while those of the next two are made."""

FEWEST_LEFT_OUT = 4
"""How many layers are to be saved, so that it is worth looking."""

MOST_STACKS = 4
"""How many stacks of layers are looked at: those with most modules."""

Where = tuple[int, str]


class NotPeriodicError(Exception):
    """Layers are not the same again and again."""


class Stack:
    """The layers of one list of modules: ``layers.3`` of ``layers``."""

    def __init__(self, path: str) -> None:
        self._prefix = f"{path}." if path else ""
        self._known: dict[str, Where | None] = {}

    def where(self, name: str) -> Where | None:
        """The number of the layer that a name is of, and the rest of it; None for one of no layer."""
        if name not in self._known:
            self._known[name] = self._found(name)
        return self._known[name]

    def name(self, layer: int, rest: str) -> str:
        """The inverse of :meth:`where`."""
        return f"{self._prefix}{layer}{rest}"

    def _found(self, name: str) -> Where | None:
        if not name.startswith(self._prefix):
            return None
        behind = name[len(self._prefix) :]
        digits = len(behind) - len(behind.lstrip("0123456789"))
        is_layer = digits and behind[digits : digits + 1] in ("/", ".") and str(int(behind[:digits])) == behind[:digits]
        return (int(behind[:digits]), behind[digits:]) if is_layer else None


@dataclass(frozen=True)
class LongBucket:
    """A bucket with tensors of all layers: what it is called in the whole step and in the shortened one, the bytes that
    it sends there and there, and how many buffers it has for all of its tensors together.
    """

    name: str
    short_name: str
    size_bytes: int
    short_bytes: int
    buffers: int


@dataclass(frozen=True)
class Shortened:
    """A graph and a plan without ``count`` layers from ``cut`` on, which are as the last ``period`` before these.

    Operators, tensors and parameters keep their names. Layers are numbered on without a gap (:meth:`number`); what is
    the same for all of them holds from ``first`` to ``end``, in numbers of the whole step. None has to do with one more
    than ``reach`` layers away, but in the buckets that are ``long``, by their keys.
    """

    graph: CapturedGraph
    plan: ShardingPlan
    stack: Stack
    first: int
    end: int
    cut: int
    count: int
    period: int
    reach: int
    long: Mapping[object, LongBucket] = field(default_factory=dict)

    @property
    def left_out(self) -> range:
        """The layers left out."""
        return range(self.cut, self.cut + self.count)

    def number(self, layer: int) -> int | None:
        """The number of a layer in the shortened step; None for one that is left out, or not as the others."""
        if self.first <= layer < self.cut:
            return layer
        return layer - self.count if self.cut + self.count <= layer < self.end else None

    def layer(self, number: int) -> int:
        """The layer of a number."""
        return number if number < self.cut else number + self.count

    def like(self, layer: int) -> int:
        """The number of the layer that one left out is as."""
        return self.cut - self.period + (layer - self.cut) % self.period

    def copies(self, number: int) -> Iterator[int]:
        """The layers left out that are as the layer of this number."""
        start = self.cut - self.period
        if start <= number < self.cut:
            yield from range(number + self.period, self.cut + self.count, self.period)


def shortened(graph: CapturedGraph, plan: ShardingPlan) -> list[Shortened]:
    """A step shortened by one stack of layers, that by another, and so on; nothing where no layers are the same."""
    found: list[Shortened] = []
    if graph.micro_batches > 1:
        return found
    for path in _stacks(graph):
        short = _without_layers(graph, plan, Stack(path))
        if short is not None:
            graph, plan = short.graph, short.plan
            found.append(short)
    return found


def _stacks(graph: CapturedGraph) -> list[str]:
    """The paths of lists of modules that may have enough layers, those with most modules first."""
    numbers: dict[str, set[int]] = defaultdict(set)
    modules: dict[str, int] = defaultdict(int)
    for module in {node.name.partition("/")[0] for _, node in graph.of_kind("operator")}:
        parts = module.split(".")
        for k, part in enumerate(parts):
            if part.isdecimal():
                path = ".".join(parts[:k])
                numbers[path].add(int(part))
                modules[path] += 1
    enough = [path for path, each in numbers.items() if len(each) >= _fewest(1, REACH)]
    return sorted(enough, key=lambda path: (-modules[path], path))[:MOST_STACKS]


def _fewest(period: int, reach: int) -> int:
    return 2 * (period + reach) + max(FEWEST_LEFT_OUT, period)


def _without_layers(graph: CapturedGraph, plan: ShardingPlan, stack: Stack) -> Shortened | None:
    try:
        layers = _Layers(graph, plan, stack)
        first, end, period = layers.longest_run()
        reach = max(layers.reach(first, end), REACH)
        while end - first >= _fewest(period, reach):
            short = _Writer(graph, plan, layers, first, end, period, reach).written()
            turns = _SameTurns(graph, plan, short)
            if turns.reach <= reach:
                return replace(short, long=turns.long)
            reach = turns.reach
    except NotPeriodicError:
        pass
    return None


class _Layers:
    """The layers of a stack as they are in a graph and a plan."""

    def __init__(self, graph: CapturedGraph, plan: ShardingPlan, stack: Stack) -> None:
        self.graph, self.stack = graph, stack
        self.members: dict[int, list[int]] = defaultdict(list)
        self.places: list[tuple[int, int] | None] = []
        """Of every node the layer, and its place there."""
        for i, node in enumerate(graph.nodes):
            where = stack.where(node.name) if node.kind in ("parameter", "buffer", "operator") else None
            self.places.append(where and (where[0], len(self.members[where[0]])))
            if where is not None:
                self.members[where[0]].append(i)
        self._operators = {entry.name: entry for entry in plan.operators}
        self._held = {entry.name: entry.layout for entry in (*plan.parameters, *plan.buffers)}
        self._given = dict(graph.gradients), dict(graph.mutations)
        self._replaced = graph.replaced
        self._moved: dict[int, list[Redistribution]] = defaultdict(list)
        for entry in plan.redistributions:
            found = stack.where(entry.tensor)
            if found is not None:
                self._moved[found[0]].append(entry)

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
            if found and found[-1] + 1 - (found[0] - period) >= _fewest(period, REACH):
                return found[0] - period, found[-1] + 1, period
        raise NotPeriodicError

    def reach(self, first: int, end: int) -> int:
        """How many layers away layers of a run take things from, or give them to, at most."""
        found = {0}
        for layer in range(first, min(end, first + MOST_PERIOD)):
            for i in self.members[layer]:
                taken = (self.places[ref.node] for ref in self.graph.nodes[i].inputs)
                found.update(abs(place[0] - layer) for place in taken if place)
            for entry in self._moved[layer]:
                read = map(self.stack.where, entry.consumers)
                found.update(abs(where[0] - layer) for where in read if where)
        return max(found)

    def _is_alike(self, one: int, other: int) -> bool:
        mine, its = self.members.get(one, ()), self.members.get(other, ())
        if not mine or len(mine) != len(its) or len(self._moved[one]) != len(self._moved[other]):
            return False
        nodes = self.graph.nodes
        is_same_node = all(self._is_alike_node(nodes[a], nodes[b], one, other) for a, b in zip(mine, its))
        moved = zip(self._moved[one], self._moved[other])
        return is_same_node and all(self._is_alike_move(a, b, one, other) for a, b in moved)

    def _is_alike_node(self, a: Node, b: Node, one: int, other: int) -> bool:
        if a.kind != b.kind or a.phase != b.phase or a.op is not b.op or a.outputs != b.outputs or a.orders != b.orders:
            return False
        if self.stack.where(a.name)[1] != self.stack.where(b.name)[1]:  # type: ignore[index]
            return False
        if a.kind == "operator":
            its, theirs = self._operators[a.name], self._operators[b.name]
            if its.inputs != theirs.inputs or its.outputs != theirs.outputs:
                return False
            return self._is_same(a.args, b.args, one, other) and self._is_same(a.kwargs, b.kwargs, one, other)
        if self._held[a.name] != self._held[b.name] or (a.name in self._replaced) != (b.name in self._replaced):
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

    def _is_alike_move(self, a: Redistribution, b: Redistribution, one: int, other: int) -> bool:
        if (a.phase, a.path, a.kept, a.shared) != (b.phase, b.path, b.kept, b.shared):
            return False
        sent = ([(c.kind, c.axis, c.size_bytes) for c in each.collectives] for each in (a, b))
        tensors = (self.stack.where(each.tensor) for each in (a, b))
        read = ([self._relative(name, layer) for name in each.consumers] for each, layer in ((a, one), (b, other)))
        return all(x == y for x, y in (tuple(sent), tuple(rest for _, rest in filter(None, tensors)), tuple(read)))

    def _relative(self, name: str, layer: int) -> object:
        where = self.stack.where(name)
        return name if where is None else (where[0] - layer, where[1])


class _Writer:
    """Writes a step without some layers of a run."""

    def __init__(
        self, graph: CapturedGraph, plan: ShardingPlan, layers: _Layers, first: int, end: int, period: int, reach: int
    ) -> None:
        self._graph, self._plan, self._layers, self._stack = graph, plan, layers, layers.stack
        self._first, self._end, self._period, self._reach = first, end, period, reach
        self._cut = first + period + reach
        self._count = (end - self._cut - period - reach) // period * period
        self._behind = self._cut + self._count
        self._left_out = range(self._cut, self._behind)
        self._out = {i for layer in self._left_out for i in layers.members[layer]}
        self._numbers = {i: k for k, i in enumerate(i for i in range(len(graph.nodes)) if i not in self._out)}

    def written(self) -> Shortened:
        """The shortened step.

        Raises:
            NotPeriodicError: what is of no layer, or of one that is not as the others, has to do with those left out.
        """
        graph, plan = self._graph, self._plan
        self._check_given()
        for phase in PHASES:
            self._check_order(phase)
        nodes = tuple(self._node(i) for i in self._numbers)
        kept = {node.name for node in nodes} | {name for name, _ in graph.unused}
        short_graph = replace(
            graph,
            nodes=nodes,
            outputs=tuple(ref and self._ref(ref, None) for ref in graph.outputs),
            gradients=self._given(graph.gradients),
            mutations=self._given(graph.mutations),
        )
        short_plan = replace(
            plan,
            parameters=tuple(entry for entry in plan.parameters if entry.name in kept),
            buffers=tuple(entry for entry in plan.buffers if entry.name in kept),
            operators=tuple(entry for entry in plan.operators if entry.name in kept),
            redistributions=tuple(self._moves()),
            execution=tuple(entry for entry in plan.execution if entry.name in kept),
        )
        return Shortened(
            short_graph,
            short_plan,
            self._stack,
            self._first,
            self._end,
            self._cut,
            self._count,
            self._period,
            self._reach,
        )

    def _node(self, index: int) -> Node:
        node, place = self._graph.nodes[index], self._layers.places[index]
        if not node.inputs:
            return node
        args, kwargs = (map_refs(each, lambda ref: self._ref(ref, place)) for each in (node.args, node.kwargs))
        return replace(node, args=args, kwargs=kwargs)

    def _ref(self, ref: Ref, reader: tuple[int, int] | None) -> Ref:
        """A tensor as the shortened step numbers it, for a reader in a layer, or in none."""
        place, index = self._layers.places[ref.node], ref.node
        if place is not None and reader is not None and self._is_in_run(reader[0]):
            layer = self._beside(place[0], reader[0])
            index = self._layers.members[layer][place[1]]
        if index in self._out:
            raise NotPeriodicError
        return Ref(self._numbers[index], ref.output)

    def _is_in_run(self, layer: int) -> bool:
        return self._first <= layer < self._end

    def _beside(self, layer: int, reader: int) -> int:
        """The layer that is left and lies as far from that of a reader as another one does in the whole step."""
        if reader < self._cut:
            return layer if layer < self._cut else layer + self._count
        return layer if layer >= self._behind else layer - self._count

    def _given(self, entries: Iterable[tuple[str, Ref]]) -> tuple[tuple[str, Ref], ...]:
        """Gradients of parameters, or new values of buffers, that are left."""
        found = []
        for name, ref in entries:
            where = self._stack.where(name)
            if where is None or where[0] not in self._left_out:
                found.append((name, self._ref(ref, where and (where[0], 0))))
        return tuple(found)

    def _check_given(self) -> None:
        """Checks that the layers left out give gradients alone, each made by an operator of the backward."""
        nodes, out = self._graph.nodes, {self._graph.nodes[i].name for i in self._out}
        made = (nodes[ref.node] for name, ref in self._graph.gradients if name in out)
        if any(node.kind != "operator" or node.phase != "backward" for node in made):
            raise NotPeriodicError
        if not out.isdisjoint([*(name for name, _ in self._graph.mutations), *self._plan.deferred]):
            raise NotPeriodicError

    def _moves(self) -> Iterator[Redistribution]:
        """Redistributions of tensors that are left, for consumers that are."""
        for entry in self._plan.redistributions:
            where = self._stack.where(entry.tensor)
            if where is not None and where[0] in self._left_out:
                continue
            consumers = tuple(name for each in entry.consumers for name in self._consumer(each, where))
            if entry.consumers and not consumers:
                raise NotPeriodicError
            yield entry if consumers == entry.consumers else replace(entry, consumers=consumers)

    def _consumer(self, name: str, tensor: Where | None) -> Iterator[str]:
        where = self._stack.where(name)
        if where is None:
            yield name
        elif tensor is not None and self._is_in_run(tensor[0]):
            yield self._stack.name(self._beside(where[0], tensor[0]), where[1])
        elif where[0] not in self._left_out:
            yield name

    def _check_order(self, phase: Phase) -> None:
        """Checks that the operators of the layers left out, and of those beside them, stand layer behind layer, in each
        in the same order; all of them at once, or some of every layer before the others.
        """
        places = self._layers.places
        operators = [i for i, node in self._graph.of_kind("operator") if node.phase == phase]
        groups = [(layer, list(each)) for layer, each in groupby(operators, lambda i: (places[i] or (None,))[0])]
        low, high, behind = self._cut - self._period - self._reach, self._behind + self._reach, self._behind
        k = 0
        while k < len(groups):
            layer = groups[k][0]
            if layer is None or layer not in self._left_out:
                k += 1
                continue
            ascends = layer == self._cut
            start = k - (self._cut - low) if ascends else k - (high + 1 - behind)
            chain = groups[max(start, 0) : max(start, 0) + high - low + 1]
            wanted = range(low, high + 1) if ascends else range(high, low - 1, -1)
            if start < 0 or [number for number, _ in chain] != list(wanted):
                raise NotPeriodicError
            stand = {number: [places[i] and places[i][1] for i in each] for number, each in chain}  # type: ignore[index]
            if any(stand[number] != stand[number - self._period] for number in range(low + self._period, high + 1)):
                raise NotPeriodicError
            k = start + len(chain)


class _SameTurns:
    """Compares the schedule of a step with that of the shortened step.

    ``reach`` is how many layers away from where it is done tensors are brought at most, but in the ``long`` buckets.

    Raises:
        NotPeriodicError: it is not the same in all layers left out, or not that of the shortened step.
    """

    def __init__(self, graph: CapturedGraph, plan: ShardingPlan, short: Shortened) -> None:
        self._short, self._stack = short, short.stack
        self._whole, self._left = scheduled(graph, plan), scheduled(short.graph, short.plan)
        self.reach, self.long = 0, dict[object, LongBucket]()
        for phase in PHASES:
            self._compare(self._whole.turns(phase), self._left.turns(phase))

    def _compare(self, turns: Mapping[str, Sequence[Turn]], left: Mapping[str, Sequence[Turn]]) -> None:
        short, seen = self._short, 0
        for operator, found in turns.items():
            where, like = self._stack.where(operator), operator
            is_left = where is None or where[0] not in short.left_out
            if where is not None and not is_left:
                like = self._stack.name(short.like(where[0]), where[1])
            its = left.get(like, ())
            if len(its) != len(found):
                raise NotPeriodicError
            for turn, other in zip(found, its):
                if not self._is_same(turn, other, operator, like) and not (is_left and self._is_longer(turn, other)):
                    raise NotPeriodicError
            seen += is_left
        if seen < len(left):
            raise NotPeriodicError

    def _is_same(self, turn: Turn, other: Turn, operator: str, like: str) -> bool:
        """Whether the same is done in the turn of an operator and in that of the one that is like it."""
        mine, its = self._whole.buckets[turn.bucket], self._left.buckets[other.bucket]
        sent, sends = mine.travels[turn.travel], its.travels[other.travel]
        if _done(turn, mine) != _done(other, its):
            return False
        if (sent.kind, sent.axis, sent.size_bytes) != (sends.kind, sends.axis, sends.size_bytes):
            return False
        if len(mine.members) != len(its.members):
            return False
        at, its_at = self._layer(operator), self._number(like)
        furthest = 0
        for a, b in zip(mine.members, its.members):
            layer, number = self._layer(a.tensor), self._number(b.tensor)
            if a.path != b.path:
                return False
            if at is None or layer is None:
                is_same = a.tensor == b.tensor
            else:
                is_same = number is not None and its_at is not None and layer - at == number - its_at
                is_same = is_same and self._rest(a.tensor) == self._rest(b.tensor)
                furthest = max(furthest, abs(layer - at))
            if not is_same:
                return False
        self.reach = max(self.reach, furthest)
        return True

    def _is_longer(self, turn: Turn, other: Turn) -> bool:
        """Whether a bucket is one of the shortened step, with as much of each of the layers left out as of those that
        these are like.
        """
        short = self._short
        mine, its = self._whole.buckets[turn.bucket], self._left.buckets[other.bucket]
        of_layer: dict[int, list[object]] = defaultdict(list)
        left: list[Redistribution] = []
        for entry in mine.members:
            layer = self._layer(entry.tensor)
            if layer is not None:
                of_layer[layer].append((self._rest(entry.tensor), entry.path))
            if layer is None or layer not in short.left_out:
                left.append(entry)
        if [(entry.tensor, entry.path) for entry in left] != [(entry.tensor, entry.path) for entry in its.members]:
            return False
        if mine.key != its.key:
            return False
        if any(of_layer[layer] != of_layer[layer - short.period] for layer in short.left_out):
            return False
        if _done(turn, mine) != _done(other, its):
            return False
        sent, sends = mine.travels[0], its.travels[0]
        buffers = sum(1 if travel.kind == "all_reduce" else 2 for travel in mine.travels)
        self.long[its.key] = LongBucket(bucket_name(mine), bucket_name(its), sent.size_bytes, sends.size_bytes, buffers)
        return True

    def _layer(self, name: str) -> int | None:
        """The layer of a name of the whole step, where it is one of those that are the same."""
        where = self._stack.where(name)
        return where[0] if where is not None and self._short.first <= where[0] < self._short.end else None

    def _number(self, name: str) -> int | None:
        """The number of a layer of the shortened step, where it is one of those that are the same."""
        where = self._stack.where(name)
        return where and self._short.number(where[0])

    def _rest(self, name: str) -> str:
        where = self._stack.where(name)
        assert where is not None
        return where[1]


def _done(turn: Turn, bucket: Bucket) -> tuple[object, ...]:
    """What is done in a turn, but for what it is done with."""
    return turn.what, turn.travel, bucket.is_early, bucket.is_deferred
