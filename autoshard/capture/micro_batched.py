"""A step of several micro-batches: the graph of one of them, in which what is held over the step has operators.

Between a parameter and those who read it stands the copy that is held for the step, and between its gradient and the
parameter the sum over the micro-batches. Both give what they take, in a layout of their own. So how a parameter gets to
its copy, and a sum to its parameter, are redistributions like all others, which run once in a step; those behind the
copy and before the sum run in every micro-batch.

    one batch      W -> mm                      bwd.mm -> W
    several        W -> held_W -> mm            bwd.mm -> summed_W -> W
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ..errors import InputError
from ..micro_batches import held_name, summed_name
from .graph import CapturedGraph, Node, Phase, Ref, map_refs

_SAME = torch.ops.aten.alias.default


def micro_batched(graph: CapturedGraph, micro_batches: int) -> CapturedGraph:
    """The graph of a micro-batch of a step of so many; the graph itself for one, or where it is that.

    Args:
        graph: as captured, with the shapes of one micro-batch.

    Raises:
        InputError: the number is below 1, the graph has no gradients to add up, or it writes into parameters.
    """
    if micro_batches < 1:
        raise InputError(f"micro_batches is {micro_batches}: expected a number from 1 up")
    if micro_batches == graph.micro_batches:
        return graph
    assert graph.one_batch is None, "the graph is one of several micro-batches already"
    if not graph.gradients:
        raise InputError(f"a step of {micro_batches} micro-batches needs gradients, but the model has none")
    if written := {name for name, _ in graph.mutations} & {node.name for _, node in graph.of_kind("parameter")}:
        raise InputError(
            f"the forward writes into the parameter {min(written)}, and a step of {micro_batches} micro-batches gathers"
            " parameters once; plan one micro-batch, or write between steps"
        )
    return _Writer(graph, micro_batches).graph()


class _Writer:
    def __init__(self, graph: CapturedGraph, micro_batches: int) -> None:
        self._graph, self._micro_batches = graph, micro_batches
        self._nodes: list[Node] = []
        self._moved: dict[int, int] = {}
        self._held: dict[int, int] = {}
        self._summed: dict[str, Ref] = {}

    def graph(self) -> CapturedGraph:
        graph = self._graph
        first = next(i for i, node in enumerate(graph.nodes) if node.kind == "operator")
        for index, node in enumerate(graph.nodes):
            if index == first:
                self._hold()
            self._moved[index] = self._append(node)
            if node.phase == "backward":
                self._sum(index)
        self._sum(None)
        return replace(
            graph,
            nodes=tuple(self._nodes),
            outputs=tuple(ref and self._read(ref) for ref in graph.outputs),
            gradients=tuple((name, self._summed[name]) for name, _ in graph.gradients),
            mutations=tuple((name, self._read(ref)) for name, ref in graph.mutations),
            micro_batches=self._micro_batches,
            one_batch=graph,
        )

    def _hold(self) -> None:
        """Appends the copies of the parameters that some operator reads."""
        read = {ref.node for node in self._graph.nodes for ref in node.inputs}
        for index, node in self._graph.of_kind("parameter"):
            if index in read:
                self._held[index] = self._same(held_name(node.name), "forward", Ref(self._moved[index]), node)

    def _sum(self, index: int | None) -> None:
        """Appends the sums of the gradients that a node of the backward makes; of all that are left (None)."""
        numbers = {node.name: node for _, node in self._graph.of_kind("parameter")}
        for name, ref in self._made(index):
            self._summed[name] = Ref(self._same(summed_name(name), "backward", self._read(ref), numbers[name]))

    def _made(self, index: int | None) -> Iterator[tuple[str, Ref]]:
        for name, ref in self._graph.gradients:
            if name not in self._summed and index in (None, ref.node):
                yield name, ref

    def _same(self, name: str, phase: Phase, ref: Ref, parameter: Node) -> int:
        node = Node(name, "operator", phase, parameter.outputs, _SAME, (ref,), source=parameter.source)
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _append(self, node: Node) -> int:
        self._nodes.append(
            replace(node, args=map_refs(node.args, self._read), kwargs=map_refs(node.kwargs, self._read))
        )
        return len(self._nodes) - 1

    def _read(self, ref: Ref) -> Ref:
        """Where a tensor stands now: a parameter is read from its copy."""
        found = self._held.get(ref.node)
        return Ref(self._moved[ref.node] if found is None else found, ref.output)
