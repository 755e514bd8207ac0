"""Graphs of deep models from graphs of short ones: what stands for one block of a stack is repeated by its index.

A graph of ``SHORT`` blocks has a first block, two in the middle and two last ones (of a decoder that reads an encoder's
result, the last but one is where gradients are first added up). Those in the middle must be the same but for the index:
node for node, operator for operator, argument for argument, with inputs from the same places of the block itself, of
the one before and the one after it, and of what belongs to no block. The second of them then stands for all up to the
last two. Submodules of the stack that stand before its blocks keep their numbers; those behind get the ones that they
have in the deep model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any, TypeVar

from ..graph import CapturedGraph, Node, Ref, SameTensor, map_refs
from .blocks import MIDDLE, SHORT, Stack

T = TypeVar("T")


class NotPeriodicError(Exception):
    """The blocks of a graph are not the same one again and again."""


@dataclass(frozen=True)
class _Place:
    """The block that something belongs to (None for none), the submodule of the block, and its name without that of the
    submodule; of what belongs to no block the name in the deep graph.
    """

    block: int | None
    local: str
    child: int = 0


class Repeated:
    """The nodes of a short graph with the blocks of ``stack`` repeated until there are as many as it has.

    Raises:
        NotPeriodicError: they are not the same.
    """

    def __init__(self, nodes: Sequence[Node], stack: Stack) -> None:
        self._stack, self._path, self._size = stack, stack.path, stack.size
        name = re.escape(f"{stack.path}." if stack.path else "")
        self._of_stack = re.compile(rf"{name}(\d+)(?=[./])(.*)", re.DOTALL)
        self._places = [self._place(node.name) for node in nodes]
        self._regions = _Regions(nodes, [place.block for place in self._places])
        self._check_middle(nodes)
        order = [
            placed
            for _, phase in groupby(range(len(nodes)), lambda i: nodes[i].phase)
            for placed in self._spread(list(phase), lambda i: self._places[i])
        ]
        self._numbers = {
            (self._places[i].local if copy is None else (copy, self._places[i].child, self._places[i].local)): k
            for k, (i, copy) in enumerate(order)
        }
        self.nodes = tuple(self._copied(nodes[i], self._places[i], copy) for i, copy in order)

    def ref(self, ref: Ref) -> Ref:
        """The number of a tensor of the short graph, for who belongs to no block."""
        return self._ref(ref, _Place(None, ""), None)

    def named(self, entries: Iterable[T], name_of: Callable[[T], str]) -> Iterator[tuple[T, str, Callable[[Ref], Ref]]]:
        """Entries that belong to parameters or buffers, repeated: each with its name and the way its tensors go."""
        for entry, copy in self._spread(list(entries), lambda each: self._place(name_of(each))):
            place = self._place(name_of(entry))
            yield entry, self._name(place, copy), partial(self._ref, reader=place, copy=copy)

    def is_renamed(self, name: str) -> bool:
        """Whether something is called otherwise in the deep graph: it belongs to a block, or stands behind them."""
        place = self._place(name)
        return place.block is not None or place.local != name

    def _place(self, name: str) -> _Place:
        found = self._of_stack.fullmatch(name)
        if found is None or int(found[1]) < self._stack.first:
            return _Place(None, name)
        block, child = divmod(int(found[1]) - self._stack.first, self._stack.each)
        if block < SHORT:
            return _Place(block, found[2], child)
        return _Place(None, self._called(block - SHORT + self._size, child, found[2]))

    def _called(self, block: int, child: int, local: str) -> str:
        """The name of what belongs to a submodule of a block."""
        return f"{self._path}.{self._stack.first + block * self._stack.each + child}{local}".removeprefix(".")

    def _spread(self, items: Sequence[T], place_of: Callable[[T], _Place]) -> Iterator[tuple[T, int | None]]:
        """Items in the order of the deep graph, each with the block it is a copy for."""
        runs = [(block, list(run)) for block, run in groupby(items, lambda item: place_of(item).block)]
        while runs:
            block, run = runs.pop(0)
            if block is None:
                yield from ((item, None) for item in run)
                continue
            blocks = {block: run} | dict(runs[: SHORT - 1])
            rises = list(blocks) == list(range(SHORT))
            if not rises and list(blocks) != list(reversed(range(SHORT))):
                raise NotPeriodicError(f"the blocks of {self._path} come in the order {list(blocks)}")
            del runs[: SHORT - 1]
            copies = range(self._size)
            for copy in copies if rises else reversed(copies):
                yield from ((item, copy) for item in blocks[self._template(copy)])

    def _template(self, copy: int) -> int:
        return max(min(copy, MIDDLE[1]), copy - self._size + SHORT)

    def _check_middle(self, nodes: Sequence[Node]) -> None:
        first, second = ([self._alike(n, p) for n, p in zip(nodes, self._places) if p.block == k] for k in MIDDLE)
        if not first or first != second:
            raise NotPeriodicError(f"the blocks in the middle of {self._path} differ")

    def _alike(self, node: Node, place: _Place) -> tuple[Any, ...]:
        """What is the same for a node in every block."""

        def relative(ref: Ref) -> tuple[object, ...]:
            target = self._places[ref.node]
            steps = None if target.block is None or place.block is None else target.block - place.block
            return steps, target.child, target.local, ref.output

        args, kwargs = map_refs(node.args, relative), map_refs(node.kwargs, relative)
        mark = self._regions.relative(node, place.block)
        what = node.kind, node.phase, node.outputs, node.op, repr((args, kwargs)), node.source
        return place.child, place.local, *what, mark

    def _copied(self, node: Node, place: _Place, copy: int | None) -> Node:
        args, kwargs = (map_refs(given, lambda ref: self._ref(ref, place, copy)) for given in (node.args, node.kwargs))
        mark = self._regions.shifted(node, place.block, copy, self._size)
        return replace(node, name=self._name(place, copy), args=args, kwargs=kwargs, mark=mark)

    def _name(self, place: _Place, copy: int | None) -> str:
        return place.local if copy is None else self._called(copy, place.child, place.local)

    def _ref(self, ref: Ref, reader: _Place, copy: int | None) -> Ref:
        """The number of a tensor for a reader that is a copy for a block."""
        target = self._places[ref.node]
        if target.block is None:
            key: object = target.local
        elif copy is not None and reader.block is not None:
            key = copy + target.block - reader.block, target.child, target.local
        elif target.block not in MIDDLE:
            key = target.block + (self._size - SHORT if target.block else 0), target.child, target.local
        else:
            raise NotPeriodicError(f"what belongs to no block of {self._path} reads {target.local} of one in between")
        if key not in self._numbers:
            raise NotPeriodicError(f"blocks of {self._path} have nothing that is called {target.local}")
        return Ref(self._numbers[key], ref.output)


class _Regions:
    """The calls of ``torch.utils.checkpoint``, which are numbered through all blocks."""

    def __init__(self, nodes: Sequence[Node], blocks: Sequence[int | None]) -> None:
        self._first: dict[int | None, int] = {}
        for node, block in zip(nodes, blocks):
            if node.mark is not None:
                self._first[block] = min(node.mark.region, self._first.get(block, node.mark.region))
        firsts = [self._first[block] for block in range(SHORT) if block in self._first]
        steps = {after - before for before, after in pairwise(firsts)}
        if len(firsts) not in (0, SHORT) or len(steps) > 1:
            raise NotPeriodicError("parts of several blocks are computed again together")
        self._step = steps.pop() if steps else 0

    def relative(self, node: Node, block: int | None) -> object:
        return node.mark and (node.mark.region - self._first[block], node.mark.saved)

    def shifted(self, node: Node, block: int | None, copy: int | None, size: int) -> Any:
        """The mark of a copy of a node."""
        if node.mark is None:
            return None
        is_behind = block is None and node.mark.region > self._first.get(SHORT - 1, node.mark.region)
        blocks = copy - block if copy is not None and block is not None else (size - SHORT) * is_behind
        return replace(node.mark, region=node.mark.region + blocks * self._step)


def repeated(graph: CapturedGraph, stack: Stack) -> CapturedGraph:
    """The graph of a model with all blocks of a stack, from that of the model with ``SHORT`` of them.

    Raises:
        NotPeriodicError: the blocks in the middle are not the same.
    """
    found = Repeated(graph.nodes, stack)
    same = [constant.name for constant in graph.constants if isinstance(constant, SameTensor)]
    named = [*same, *graph.replaced, *(name for alias in graph.aliases for name in alias)]
    if any(map(found.is_renamed, named)):
        raise NotPeriodicError(f"a tensor of a block of {stack.path} is a result, or is known under two names")

    def moved(entries: tuple[tuple[str, Ref], ...]) -> tuple[tuple[str, Ref], ...]:
        return tuple((name, ref(entry[1])) for entry, name, ref in found.named(entries, lambda entry: entry[0]))

    return replace(
        graph,
        nodes=found.nodes,
        outputs=tuple(ref and found.ref(ref) for ref in graph.outputs),
        gradients=moved(graph.gradients),
        mutations=moved(graph.mutations),
        unused=tuple((name, entry[1]) for entry, name, _ in found.named(graph.unused, lambda entry: entry[0])),
    )
