"""A step with fewer layers, from which one knows what the whole step does: a graph without some layers
(:mod:`autoshard.planning.short_graph`), and the plan for it.

Layers are the same where layouts, redistributions and what travels in the turn of each operator are, too. What writes
the local programs (:mod:`autoshard.lowering`) goes by nothing else, so that it does in all of these layers what it does
in one of them. Whatever is not the same leaves the step as it is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..capture import CapturedGraph, Node
from ..lowering import bucket_name, scheduled
from ..plans import PHASES, Redistribution, ShardingPlan
from ..plans.left_out import LeftOut, Stack, Where
from ..plans.schedule import Bucket, Turn
from .short_graph import REACH, Layers, NotPeriodicError, ShortGraph, fewest, stacks
from .whole_plan import with_layers


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


@dataclass(frozen=True, eq=False)
class Shortened:
    """A graph and a plan without some layers. Those that are the same have to do with none further than the reach away,
    but in the buckets that are ``long``, by their keys.
    """

    graph: CapturedGraph
    plan: ShardingPlan
    out: LeftOut
    long: Mapping[object, LongBucket] = field(default_factory=dict)


def shortened(graph: CapturedGraph, plan: ShardingPlan, shorts: Sequence[ShortGraph] = ()) -> list[Shortened]:
    """A step shortened by one stack of layers, that by another, and so on; nothing where no layers are the same.

    Args:
        shorts: how the graph was shortened before the plan was made, if it was: layers that these leave out need no
            other look.
    """
    found = list(_as_planned(plan, shorts))
    if found:
        return found
    for path in stacks(graph):
        short = _without_layers(graph, plan, Stack(path))
        if short is not None:
            graph, plan = short.graph, short.plan
            found.append(short)
    return found


def _as_planned(plan: ShardingPlan, shorts: Sequence[ShortGraph]) -> Iterator[Shortened]:
    """The steps by which a plan was made of a shorter one; none where its schedule does more."""
    plans = [plan.shortened()]
    if not shorts or plans[0] is plan:
        return
    for short in reversed(shorts[1:]):
        plans.append(plans[-1].having(with_layers(plans[-1], short)))
    found: list[Shortened] = []
    for short, its in zip(shorts, reversed(plans), strict=True):
        step = Shortened(short.graph, its, short.out)
        try:
            turns = _SameTurns(short.longer, plan, step)
        except NotPeriodicError:
            return
        if turns.reach > short.out.reach:
            return
        found.append(replace(step, long=turns.long))
        plan = its
    yield from found


def _without_layers(graph: CapturedGraph, plan: ShardingPlan, stack: Stack) -> Shortened | None:
    try:
        layers = _PlannedLayers(graph, plan, stack)
        first, end, period = layers.longest_run()
        reach = max(layers.reach(first, end), REACH)
        while end - first >= fewest(period, reach):
            found = layers.without(first, end, period, reach)
            short = Shortened(found.graph, _Writer(plan, found).written(), found.out)
            turns = _SameTurns(graph, plan, short)
            if turns.reach <= reach:
                return replace(short, long=turns.long)
            reach = turns.reach
    except NotPeriodicError:
        pass
    return None


class _PlannedLayers(Layers):
    """The layers of a stack as they are in a graph and a plan."""

    def __init__(self, graph: CapturedGraph, plan: ShardingPlan, stack: Stack) -> None:
        super().__init__(graph, stack)
        self._operators = {entry.name: entry for entry in plan.operators}
        self._held = {entry.name: entry.layout for entry in (*plan.parameters, *plan.buffers)}
        self._moved: dict[int, list[Redistribution]] = defaultdict(list)
        for entry in plan.redistributions:
            found = stack.where(entry.tensor)
            if found is not None:
                self._moved[found[0]].append(entry)

    def _met(self, layer: int) -> Iterator[int]:
        yield from super()._met(layer)
        for entry in self._moved[layer]:
            read = map(self.stack.where, entry.consumers)
            yield from (where[0] - layer for where in read if where)

    def _is_alike(self, one: int, other: int) -> bool:
        moved = self._moved[one], self._moved[other]
        if len(moved[0]) != len(moved[1]) or not super()._is_alike(one, other):
            return False
        return all(self._is_alike_move(a, b, one, other) for a, b in zip(*moved))

    def _is_alike_node(self, a: Node, b: Node, one: int, other: int) -> bool:
        if not super()._is_alike_node(a, b, one, other):
            return False
        if a.kind == "operator":
            its, theirs = self._operators[a.name], self._operators[b.name]
            return its.inputs == theirs.inputs and its.outputs == theirs.outputs
        return bool(self._held[a.name] == self._held[b.name])

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
    """Writes a plan without the layers that a graph lacks."""

    def __init__(self, plan: ShardingPlan, short: ShortGraph) -> None:
        self._plan, self._out = plan, short.out
        self._kept = {node.name for node in short.graph.nodes} | {name for name, _ in short.graph.unused}

    def written(self) -> ShardingPlan:
        plan, kept, out = self._plan, self._kept, self._out
        late = (out.stack.where(name) for name in plan.deferred)
        if any(where is not None and where[0] in out.layers for where in late):
            raise NotPeriodicError
        return replace(
            plan,
            parameters=tuple(entry for entry in plan.parameters if entry.name in kept),
            buffers=tuple(entry for entry in plan.buffers if entry.name in kept),
            operators=tuple(entry for entry in plan.operators if entry.name in kept),
            redistributions=tuple(self._moves()),
            execution=tuple(entry for entry in plan.execution if entry.name in kept),
        )

    def _moves(self) -> Iterator[Redistribution]:
        """Redistributions of tensors that are left, for consumers that are."""
        for entry in self._plan.redistributions:
            where = self._out.stack.where(entry.tensor)
            if where is not None and where[0] in self._out.layers:
                continue
            consumers = tuple(name for each in entry.consumers for name in self._consumer(each, where))
            if entry.consumers and not consumers:
                raise NotPeriodicError
            yield entry if consumers == entry.consumers else replace(entry, consumers=consumers)

    def _consumer(self, name: str, tensor: Where | None) -> Iterator[str]:
        out = self._out
        where = out.stack.where(name)
        if where is None:
            yield name
        elif tensor is not None and out.first <= tensor[0] < out.end:
            yield out.stack.name(out.beside(where[0], tensor[0]), where[1])
        elif where[0] not in out.layers:
            yield name


class _SameTurns:
    """Compares the schedule of a step with that of the shortened step.

    ``reach`` is how many layers away from where it is done tensors are brought at most, but in the ``long`` buckets.

    Raises:
        NotPeriodicError: it is not the same in all layers left out, or not that of the shortened step.
    """

    def __init__(self, graph: CapturedGraph, plan: ShardingPlan, short: Shortened) -> None:
        self._out, self._stack = short.out, short.out.stack
        self._whole, self._left = scheduled(graph, plan), scheduled(short.graph, short.plan)
        self.reach, self.long = 0, dict[object, LongBucket]()
        for phase in PHASES:
            self._compare(self._whole.turns(phase), self._left.turns(phase))

    def _compare(self, turns: Mapping[str, Sequence[Turn]], left: Mapping[str, Sequence[Turn]]) -> None:
        out, seen = self._out, 0
        for operator, found in turns.items():
            where, like = self._stack.where(operator), operator
            is_left = where is None or where[0] not in out.layers
            if where is not None and not is_left:
                like = self._stack.name(out.like(where[0]), where[1])
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
        out = self._out
        mine, its = self._whole.buckets[turn.bucket], self._left.buckets[other.bucket]
        of_layer: dict[int, list[object]] = defaultdict(list)
        left: list[Redistribution] = []
        for entry in mine.members:
            layer = self._layer(entry.tensor)
            if layer is not None:
                of_layer[layer].append((self._rest(entry.tensor), entry.path))
            if layer is None or layer not in out.layers:
                left.append(entry)
        if [(entry.tensor, entry.path) for entry in left] != [(entry.tensor, entry.path) for entry in its.members]:
            return False
        if mine.key != its.key:
            return False
        if any(of_layer[layer] != of_layer[layer - out.period] for layer in out.layers):
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
        return where[0] if where is not None and self._out.first <= where[0] < self._out.end else None

    def _number(self, name: str) -> int | None:
        """The number of a layer of the shortened step, where it is one of those that are the same."""
        return self._out.number_of(name)

    def _rest(self, name: str) -> str:
        where = self._stack.where(name)
        assert where is not None
        return where[1]


def _done(turn: Turn, bucket: Bucket) -> tuple[object, ...]:
    """What is done in a turn, but for what it is done with."""
    return turn.what, turn.travel, bucket.is_early, bucket.is_deferred
