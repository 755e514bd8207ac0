"""A graph that is only read: who counts its memory walks through it once, and nobody calls it.

It is written as a graph of ``torch.fx`` is, and its nodes are read as those are, but only inputs have names, and nodes
do not know who reads them. To make a node of ``torch.fx`` takes as long as everything else that is done to write it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx


class SketchNode:
    """A node: see :class:`torch.fx.Node` for what it is made of."""

    __slots__ = ("args", "kwargs", "meta", "name", "next", "op", "target")

    def __init__(self, op: str, target: Any, args: tuple[Any, ...] = (), name: str = "") -> None:
        self.op, self.target, self.name = op, target, name
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = {}
        self.meta: dict[str, Any] = {}
        self.next: SketchNode | None = None

    @property
    def all_input_nodes(self) -> list[SketchNode]:
        """The nodes among the arguments, each once, in the order in which they come."""
        found = dict.fromkeys(_nodes_in(self.args))
        return list(found | dict.fromkeys(_nodes_in(self.kwargs.values())) if self.kwargs else found)


class Sketch:
    """The graph: see :class:`torch.fx.Graph` for what its methods add."""

    def __init__(self) -> None:
        self.nodes: list[SketchNode] = []

    def placeholder(self, name: str) -> SketchNode:
        """Adds an input."""
        return self._added(SketchNode("placeholder", name, name=name))

    def call_function(self, function: Any) -> SketchNode:
        """Adds a call, whose arguments are given to the node."""
        return self._added(SketchNode("call_function", function))

    def output(self, results: Any) -> SketchNode:
        """Adds what the graph returns."""
        return self._added(SketchNode("output", "output", (results,)))

    def lint(self) -> None:
        """There is nothing to check: nodes are made by :class:`autoshard.lowering.emitter.GraphEmitter` alone, which
        checks the same graph where it is to run.
        """

    def _added(self, node: SketchNode) -> SketchNode:
        if self.nodes:
            self.nodes[-1].next = node
        self.nodes.append(node)
        return node


NODES = (fx.Node, SketchNode)
"""What a node of a local graph is."""


def _nodes_in(given: Iterable[Any]) -> list[SketchNode]:
    found = []
    for each in given:
        kind = type(each)
        if kind is SketchNode:
            found.append(each)
        elif kind is not int and isinstance(each, (tuple, list)):
            found += _nodes_in(each)
    return found
