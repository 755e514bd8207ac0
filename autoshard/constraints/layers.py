"""Identical layers: the nodes that do the same in each, so that they are decided once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import lru_cache

from ..capture import CapturedGraph, Ref
from ..ops import is_contraction

# A lone linear layer may well alternate with its neighbour: cut its columns, then its rows.
_FEWEST_CONTRACTIONS = 2

MOST_MODULES = 1 << 14
"""Modules whose layers are kept: a module has many operators."""


def tied_nodes(graph: CapturedGraph, found: Mapping[str, list[int]]) -> tuple[tuple[int, ...], ...]:
    """Classes of nodes that stand at the same place in identical layers, of those found by :func:`layers`.

    A layer is a module whose name ends in a number (``layers.3``). Two layers of one list are identical when they hold
    the same operators with the same arguments, shapes and inner edges, in the same order, and at least two matrix
    products. Returns the classes with at least two members, as sorted node indices.
    """
    parent = list(range(len(graph.nodes)))

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for group in _identical_layers(graph, found):
        for same in zip(*group):
            for other in same[1:]:
                parent[find(other)] = find(same[0])
    classes: dict[int, list[int]] = defaultdict(list)
    for i in range(len(graph.nodes)):
        classes[find(i)].append(i)
    return tuple(tuple(members) for members in classes.values() if len(members) > 1)


def layers(graph: CapturedGraph) -> dict[str, list[int]]:
    """The layers by their path, each as its node indices in order: modules whose name ends in a number and that hold at
    least two matrix products. A layer may stand inside another.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(graph.nodes):
        if node.kind in ("parameter", "buffer", "operator"):
            for prefix in _layer_prefixes(node.name.partition("/")[0]):
                members[prefix].append(index)
    return {
        prefix: nodes
        for prefix, nodes in members.items()
        if sum(is_contraction(graph.nodes[i]) for i in nodes) >= _FEWEST_CONTRACTIONS
    }


def _identical_layers(graph: CapturedGraph, found: Mapping[str, list[int]]) -> Iterator[list[list[int]]]:
    """For each list of modules, groups of identical members, each as its node indices in order."""
    groups: dict[tuple[str, object], list[list[int]]] = defaultdict(list)
    for prefix, nodes in found.items():
        groups[prefix.rpartition(".")[0], _layer_signature(graph, prefix, nodes)].append(nodes)
    yield from (group for group in groups.values() if len(group) > 1)


@lru_cache(MOST_MODULES)
def _layer_prefixes(module: str) -> tuple[str, ...]:
    parts = module.split(".")
    return tuple(".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdecimal())


def _layer_signature(graph: CapturedGraph, prefix: str, nodes: list[int]) -> object:
    position = {node: k for k, node in enumerate(nodes)}

    def relative(value: object) -> object:
        if isinstance(value, Ref):
            return ("inner", position[value.node], value.output) if value.node in position else ("outer", value.output)
        return tuple(relative(item) for item in value) if isinstance(value, tuple) else str(value)

    return tuple(
        (
            graph.nodes[i].name.removeprefix(prefix),
            graph.nodes[i].phase,
            str(graph.nodes[i].op),
            graph.nodes[i].outputs,
            relative(graph.nodes[i].args),
            relative(graph.nodes[i].kwargs),
        )
        for i in nodes
    )
