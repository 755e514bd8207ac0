"""The plan of a whole step, from that of a graph without identical layers (:mod:`autoshard.planning.short_graph`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeVar

from ..plans import PHASES, Execution, OperatorEntry, Redistribution, ShardingPlan, TensorEntry
from ..plans.natural_order import natural_key
from ..plans.plan import InOrder, Sections
from .short_graph import ShortGraph

_E = TypeVar("_E", TensorEntry, OperatorEntry, Redistribution)


def lengthened(plan: ShardingPlan, shorts: Sequence[ShortGraph]) -> ShardingPlan:
    """The plan of the longest graph.

    Args:
        plan: of the shortest one, whose layers are decided alike.
    """
    whole = plan
    for short in reversed(shorts):
        whole = whole.having(with_layers(whole, short))
    return plan.made(tuple(short.out for short in shorts), whole.sections) if shorts else plan


def with_layers(plan: ShardingPlan, short: ShortGraph) -> Sections:
    """What a plan has of every layer, with those that a graph lacks."""
    return _Lengthened(plan, short).sections()


class _Lengthened:
    """Writes the entries of a plan for a graph with some layers more, in the canonical order."""

    def __init__(self, plan: ShardingPlan, short: ShortGraph) -> None:
        self._plan, self._short, self._out = plan, short, short.out

    def sections(self) -> Sections:
        """All entries."""
        plan = self._plan
        return Sections(
            InOrder(self._with_copies(plan.parameters, self._tensor)),
            InOrder(self._with_copies(plan.buffers, self._tensor)),
            InOrder(self._with_copies(plan.operators, self._operator)),
            InOrder(self._with_copies(plan.redistributions, self._moved)),
            InOrder(self._execution()),
        )

    def _with_copies(self, entries: Sequence[_E], written: Callable[[_E, int | None], _E]) -> Iterator[_E]:
        """Entries, and behind those of the layers before the cut what they stand for.

        Args:
            written: what an entry becomes in a layer of the whole step; None for what is of none that others are as.
        """
        out = self._out
        alike: dict[int, list[_E]] = defaultdict(list)
        for (_, layer), group in groupby(entries, key=self._place):
            if alike and not (layer is not None and out.copies(layer)):
                yield from (written(entry, k) for k in out.layers for entry in alike[out.like(k)])
                alike.clear()
            each = list(group)
            in_run = layer is not None and out.number(layer) is not None
            yield from (written(entry, layer if in_run else None) for entry in each)
            if layer is not None and out.copies(layer):
                alike[layer] += each
        yield from (written(entry, k) for k in out.layers for entry in alike[out.like(k)])

    def _place(self, entry: TensorEntry | OperatorEntry | Redistribution) -> tuple[str, int | None]:
        """The phase of an entry, and the layer that it is of."""
        where = self._out.stack.where(_name(entry))
        return getattr(entry, "phase", ""), where and where[0]

    def _named(self, name: str, layer: int | None) -> str:
        where = self._out.stack.where(name)
        return name if where is None or layer is None else self._out.stack.name(layer, where[1])

    def _tensor(self, entry: TensorEntry, layer: int | None) -> TensorEntry:
        name = self._named(entry.name, layer)
        return entry if name == entry.name else TensorEntry(name, entry.shape, entry.dtype, entry.layout)

    def _operator(self, entry: OperatorEntry, layer: int | None) -> OperatorEntry:
        name = self._named(entry.name, layer)
        return entry if name == entry.name else OperatorEntry(name, entry.phase, entry.inputs, entry.outputs)

    def _moved(self, entry: Redistribution, layer: int | None) -> Redistribution:
        tensor, out = self._named(entry.tensor, layer), self._out
        if layer is None:
            found = [name for each in entry.consumers for name in out.names(each)]
            is_longer = len(found) > len(entry.consumers)
            consumers = tuple(sorted(found, key=natural_key)) if is_longer else entry.consumers
        else:
            number = out.number_of(entry.tensor)
            assert number is not None
            consumers = tuple(out.renamed(name, number, layer) for name in entry.consumers)
        if tensor == entry.tensor and consumers == entry.consumers:
            return entry
        return Redistribution(tensor, entry.phase, entry.path, entry.collectives, entry.kept, consumers, entry.shared)

    def _execution(self) -> Iterator[Execution]:
        """The operators of the longer graph in its order, the forward first."""
        short = self._short
        known = {entry.name: entry for entry in self._plan.execution}
        operators = list(short.longer.of_kind("operator")) if known else []
        for phase in PHASES:
            for i, node in operators:
                if node.phase == phase:
                    entry = known[short.graph.nodes[short.origin[i]].name]
                    yield entry if entry.name == node.name else Execution(node.name, phase, entry.predicted_ns)


def _name(entry: Any) -> str:
    return entry.tensor if isinstance(entry, Redistribution) else entry.name
