"""Computing tensors of the forward again in the backward: a graph that says so, from one that keeps everything.

An operator that is computed again gets a second one in the backward, which takes the same arguments: what the forward
made of them, or what the backward makes again of these. What the backward read of the first operator it then reads of
the second, so that nothing of the first has to live over the turn. It stands right before the first operator of the
backward that needs it. Everything behind the capture treats it as what it is, an operator of the backward: it has a
strategy, a price, redistributions and memory of its own, and runs as planned.

    forward   x -> mm -> gelu -> mm.1       kept: x, mm, gelu
    backward  grad -> bwd.mm.1 (reads gelu) -> bwd.gelu (reads mm) -> ...

    forward   x -> mm -> gelu -> mm.1       kept: x, mm
    backward  grad, again.gelu (reads mm) -> bwd.mm.1 (reads again.gelu) -> bwd.gelu (reads mm) -> ...
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..recomputation import again_name
from .graph import CapturedGraph, Node, Ref, is_random, map_refs


def can_be_again(node: Node) -> bool:
    """Whether a node can be computed again: operators of the forward that draw no random numbers. What is drawn is
    kept, so that the backward sees the same numbers.
    """
    return node.kind == "operator" and node.phase == "forward" and not is_random(node)


def recomputed(graph: CapturedGraph, names: Collection[str]) -> CapturedGraph:
    """The captured graph in which these operators of the forward, and no others, are computed again in the backward.

    Args:
        graph: as captured, or with other operators computed again.
        names: of the operators. Those that cannot be (:func:`can_be_again`), and those whose results the backward does
            not need, stay as they are.
    """
    if set(names) == set(graph.again):
        return graph
    captured = graph.original or graph
    again = {i for i, node in enumerate(captured.nodes) if node.name in names and can_be_again(node)}
    return _Writer(captured, again).graph() if again else captured


class _Writer:
    def __init__(self, graph: CapturedGraph, again: set[int]) -> None:
        self._graph, self._again = graph, again
        self._nodes: list[Node] = []
        self._first: dict[int, int] = {}
        self._second: dict[int, int] = {}

    def graph(self) -> CapturedGraph:
        graph = self._graph
        for index, node in enumerate(graph.nodes):
            if node.phase == "backward":
                for ref in node.inputs:
                    self._compute_again(ref.node)
            self._first[index] = self._append(node, again=node.phase == "backward")
        names = tuple(node.name for i, node in enumerate(graph.nodes) if i in self._second)
        return replace(
            graph,
            nodes=tuple(self._nodes),
            outputs=tuple(ref and self._moved(ref) for ref in graph.outputs),
            gradients=tuple((name, self._moved(ref)) for name, ref in graph.gradients),
            mutations=tuple((name, self._moved(ref)) for name, ref in graph.mutations),
            again=names,
            original=graph,
        )

    def _compute_again(self, index: int) -> None:
        """Appends the second operator of a node that needs one, behind those of its arguments."""
        waiting = [index]
        while waiting:
            last = waiting[-1]
            if last not in self._again or last in self._second:
                waiting.pop()
                continue
            node = self._graph.nodes[last]
            missing = [ref.node for ref in node.inputs if ref.node in self._again and ref.node not in self._second]
            if missing:
                waiting += missing
                continue
            self._second[last] = self._append(replace(node, name=again_name(node.name), phase="backward"), again=True)

    def _append(self, node: Node, *, again: bool) -> int:
        def moved(ref: Ref) -> Ref:
            return self._moved(ref, again)

        self._nodes.append(replace(node, args=map_refs(node.args, moved), kwargs=map_refs(node.kwargs, moved)))
        return len(self._nodes) - 1

    def _moved(self, ref: Ref, again: bool = False) -> Ref:
        number = self._second.get(ref.node) if again else None
        return Ref(self._first[ref.node] if number is None else number, ref.output)
