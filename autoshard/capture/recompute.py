"""Computing tensors of the forward again in the backward: a graph that says so, from one that keeps everything.

An operator that is computed again gets a second one in the backward, which takes the same arguments: what the forward
made of them, or what the backward makes again of these. What the backward read of the first operator it then reads of
the second, so that nothing of the first has to live over the turn. It stands right before the first operator of the
backward that needs it. Everything behind the capture treats it as what it is, an operator of the backward: it has a
strategy, a price, redistributions and memory of its own, and runs as planned.

When it runs does not depend on which others are computed again: it stands where it would stand if all were that may be
(:func:`recomputable`), so that the planner can say what each of them holds before it has decided.

    forward   x -> mm -> gelu -> mm.1       kept: x, mm, gelu
    backward  grad -> bwd.mm.1 (reads gelu) -> bwd.gelu (reads mm) -> ...

    forward   x -> mm -> gelu -> mm.1       kept: x, mm
    backward  grad, again.gelu (reads mm) -> bwd.mm.1 (reads again.gelu) -> bwd.gelu (reads mm) -> ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import replace

from ..micro_batches import is_held
from ..precision import is_cast
from ..recomputation import again_name
from .graph import CapturedGraph, Node, Ref, is_random, map_refs

FEWEST_WEIGHTS = 2
"""How many parameters of two and more dimensions make a module a layer."""


def can_be_again(node: Node) -> bool:
    """Whether a node can be computed again: operators of the forward that draw no random numbers. What is drawn is
    kept, so that the backward sees the same numbers; so is what is held over the step, and what is cast once for it.
    """
    is_once = is_held(node.name) or is_cast(node.name)
    return node.kind == "operator" and node.phase == "forward" and not is_random(node) and not is_once


def recomputable(graph: CapturedGraph) -> frozenset[str]:
    """The operators of which the planner decides whether they are computed again: those within a layer (in a model that
    has none, within a module of as many matrices), and those that ``torch.utils.checkpoint`` marks.
    """
    captured = graph.original or graph
    return (within_layers(captured) or _within(captured, is_layer=lambda part: True)) | marked(captured)


def within_layers(captured: CapturedGraph) -> frozenset[str]:
    """The operators within the layers of a graph as captured. What goes into a layer and what comes out of it is not.

    A layer is the innermost module whose name ends in a number and that has at least FEWEST_WEIGHTS matrices.
    """
    return _within(captured, is_layer=str.isdecimal)


def _within(captured: CapturedGraph, is_layer: Callable[[str], bool]) -> frozenset[str]:
    """Those within the innermost modules of at least FEWEST_WEIGHTS matrices whose names end as layers' do; the model
    itself has the empty name.
    """
    weights = [node.name.split(".") for _, node in captured.of_kind("parameter") if _is_matrix(node)]
    known: dict[str, str | None] = {}

    def layer_of(path: str) -> str | None:
        if path not in known:
            parts = path.split(".") if path else []
            ends = ("", *parts)
            prefixes = (parts[:k] for k in reversed(range(len(ends))) if is_layer(ends[k]))
            known[path] = next((".".join(p) for p in prefixes if _count(weights, p) >= FEWEST_WEIGHTS), None)
        return known[path]

    layers = ((i, layer_of(node.name.partition("/")[0])) for i, node in captured.of_kind("operator"))
    return frozenset(inner(captured, {i: layer for i, layer in layers if layer is not None}))


def _is_matrix(node: Node) -> bool:
    meta = node.outputs[0]
    return meta is not None and len(meta.shape) > 1


def _count(names: list[list[str]], prefix: list[str]) -> int:
    return sum(name[: len(prefix)] == prefix for name in names)


def marked(graph: CapturedGraph) -> frozenset[str]:
    """The operators that ``torch.utils.checkpoint`` in the model has computed again."""
    regions = {i: node.mark.region for i, node in enumerate(graph.nodes) if node.mark is not None}
    saved = {node.name for node in graph.nodes if node.mark is not None and node.mark.saved}
    return frozenset(inner(graph, regions)) - saved


def inner(graph: CapturedGraph, regions: Mapping[int, Hashable]) -> Iterator[str]:
    """The operators of the forward within regions whose results nothing outside of the region reads: as
    ``torch.utils.checkpoint`` has it, what goes into a region and what comes out of it is kept.
    """
    left = (*graph.outputs, *(ref for _, ref in (*graph.mutations, *graph.gradients)))
    outside = {ref.node for ref in left if ref is not None}
    for i, node in enumerate(graph.nodes):
        if node.phase == "forward":
            outside |= {ref.node for ref in node.inputs if regions.get(ref.node) != regions.get(i)}
    for i in regions:
        if i not in outside and can_be_again(graph.nodes[i]):
            yield graph.nodes[i].name


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
    if not again:
        return captured
    needed, possible = _needed(captured, again), recomputable(captured)
    placed = needed | {i for i, node in enumerate(captured.nodes) if node.name in possible}
    return _Writer(captured, needed, placed).graph()


def _needed(graph: CapturedGraph, again: Collection[int]) -> set[int]:
    """Those of the operators whose results the backward needs."""
    waiting = [ref.node for node in graph.nodes if node.phase == "backward" for ref in node.inputs]
    needed: set[int] = set()
    while waiting:
        index = waiting.pop()
        if index in again and index not in needed:
            needed.add(index)
            waiting += [ref.node for ref in graph.nodes[index].inputs]
    return needed


class _Writer:
    """Writes second operators of `again`, each where it stands if all of `placed` have one."""

    def __init__(self, graph: CapturedGraph, again: set[int], placed: set[int]) -> None:
        self._graph, self._again, self._placed = graph, again, placed
        self._done: set[int] = set()
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
            if last not in self._placed or last in self._done:
                waiting.pop()
                continue
            node = self._graph.nodes[last]
            missing = [ref.node for ref in node.inputs if ref.node in self._placed and ref.node not in self._done]
            if missing:
                waiting += missing
                continue
            self._done.add(last)
            if last in self._again:
                second = replace(node, name=again_name(node.name), phase="backward")
                self._second[last] = self._append(second, again=True)

    def _append(self, node: Node, *, again: bool) -> int:
        def moved(ref: Ref) -> Ref:
            return self._moved(ref, again)

        self._nodes.append(replace(node, args=map_refs(node.args, moved), kwargs=map_refs(node.kwargs, moved)))
        return len(self._nodes) - 1

    def _moved(self, ref: Ref, again: bool = False) -> Ref:
        number = self._second.get(ref.node) if again else None
        return Ref(self._first[ref.node] if number is None else number, ref.output)
