"""What constraints and plans call whatever has a layout: the nodes of a graph, then the results that leave it."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from ..capture import CapturedGraph, Node, Ref

Results = tuple[tuple[str, Ref], ...]
"""Tensors that leave a graph and have no tangent, by name: ``output.0``, or ``new NAME`` for what a buffer becomes.
What a parameter becomes lies as that does.
"""


def output_name(index: int) -> str:
    """The name of a leaf of the model's result, for example ``output.0``."""
    return f"output.{index}"


def pin_name(node: Node) -> str:
    """The name of a node of the graph. A tangent, ``grad.0``, goes by the output that it belongs to, ``output.0``."""
    return output_name(int(node.name.removeprefix("grad."))) if node.kind == "tangent" else node.name


def results_of(graph: CapturedGraph) -> Results:
    """The results that have a layout of their own. One with a tangent lies as its tangent does."""
    tangents = {node.name for _, node in graph.of_kind("tangent")}
    outputs = [
        (output_name(k), ref) for k, ref in enumerate(graph.outputs) if ref is not None and f"grad.{k}" not in tangents
    ]
    parameters = {node.name for _, node in graph.of_kind("parameter")}
    return (*outputs, *((f"new {name}", ref) for name, ref in graph.mutations if name not in parameters))


def names_of(graph: CapturedGraph) -> tuple[str, ...]:
    """The name of every node, then of every result: the order in which limits are numbered."""
    return (*(pin_name(node) for node in graph.nodes), *(name for name, _ in results_of(graph)))


def is_meant(name: str, graph: CapturedGraph, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns is for what has this name: a tied parameter goes by each of its names."""
    return any(fnmatchcase(each, pattern) for each in graph.called(name) for pattern in patterns)
