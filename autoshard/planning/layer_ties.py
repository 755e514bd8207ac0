"""Identical layers are decided alike: which nodes of a graph take one decision together.

Deciding all copies of a layer once makes the program as small as that of one layer. It is a constraint of its own, so a
layer is decided alike with others only where no constraint of the user tells it from them: with
``forbid collectives over tp of activations layers.2.b*``, layers 0, 1 and 3 stay together and layer 2 is decided for
itself.

Where memory binds, the first layers may be decided apart from the others: as many keep their activations as fit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..capture import CapturedGraph, Ref
from ..constraints import Alike, Constraint
from ..constraints.layers import layers, tied_nodes
from ..constraints.limits import Limits
from ..constraints.names import is_meant
from ..plans import fold_names

Mark = tuple[object, ...]

ROUNDING = 1e-6
"""What a number of layers may be above a whole one and is not rounded up for."""


def tied_classes(graph: CapturedGraph, marks: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """Classes of nodes that take one decision, each of at least two, as node indices.

    Two nodes are in one class if they stand at the same place in identical layers and all nodes of the two layers have
    equal marks, place by place.

    Args:
        marks: for every node what distinguishes it from its like in other layers (:func:`marks_of`).
    """
    numbers: dict[tuple[object, ...], int] = {}
    marked: dict[int, Mark] = defaultdict(tuple)  # the marks of the layers that a node is in, as numbers
    found = layers(graph)
    for nodes in found.values():
        number = numbers.setdefault(tuple(marks[i] for i in nodes), len(numbers))
        for i in nodes:
            marked[i] += (number,)
    classes: list[tuple[int, ...]] = []
    for members in tied_nodes(graph, found):
        same: dict[Mark, list[int]] = defaultdict(list)
        for i in members:
            same[marked[i]].append(i)
        classes.extend(tuple(nodes) for nodes in same.values() if len(nodes) > 1)
    return tuple(classes)


def in_groups(
    graph: CapturedGraph, classes: Sequence[Sequence[int]], share: float, fewest: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Classes of nodes that take one decision where identical layers are decided in two groups, and what the groups
    are called: ``layers.{0-4}`` and ``layers.{5-31}``.

    Args:
        classes: those of :func:`tied_classes`.
        share: which part of the layers the first ones are, rounded up; both groups have at least one layer.
        fewest: how many identical layers there are at least, 2 or more, where they are two groups.
    """
    found = layers(graph)
    order = {prefix: number for number, prefix in enumerate(found)}
    outermost: dict[int, str] = {}
    for prefix in sorted(found, key=len, reverse=True):
        outermost.update(dict.fromkeys(found[prefix], prefix))
    groups: tuple[set[str], set[str]] = (set(), set())
    parts: list[tuple[int, ...]] = []
    for members in classes:
        alike = sorted({outermost[i] for i in members}, key=order.__getitem__)
        count = min(math.ceil(share * len(alike) - ROUNDING), len(alike) - 1)
        first = set(alike[: max(1, count)]) if len(alike) >= fewest else set(alike)
        for group, names in zip(groups, (first, set(alike) - first)):
            group.update(names if len(alike) >= fewest else ())
            part = tuple(i for i in members if outermost[i] in names)
            parts.extend([part] if len(part) > 1 else [])
    return tuple(parts), tuple(fold_names(group) for group in groups if group)


def marks_of(
    graph: CapturedGraph,
    names: Sequence[str],
    makers: Sequence[int],
    limits: Limits,
    constraints: Sequence[Constraint],
) -> list[Mark]:
    """What constraints say of every node of a graph; two nodes have equal marks if all constraints treat them alike.

    A node is marked by the limits on its layouts, by what its results must be alike with, and by the collectives that
    constraints forbid for the tensors that it takes and makes. What is said of a result of the model, or of the new
    value of a buffer, counts for the operator that makes it.

    Args:
        names: of everything that has a layout: the nodes of the graph, then the results that leave it.
        makers: for each of these the node that makes it.
    """
    said: list[list[object]] = [[] for _ in graph.nodes]
    alike = [each for each in constraints if isinstance(each, Alike)]
    for index, name in enumerate(names):
        said[makers[index]].extend(limits.of(index))
        said[makers[index]].extend(each for each in alike if is_meant(name, graph, each.patterns))
    for i in range(len(graph.nodes)):
        said[i].extend((position, limits.rules(ref)) for position, ref in _tensors(graph, i))
    return [tuple(of_node) for of_node in said]


def _tensors(graph: CapturedGraph, i: int) -> Iterator[tuple[int, Ref]]:
    """The tensors that a node makes and takes, each with its position: results first."""
    node = graph.nodes[i]
    made = [Ref(i, k) for k, meta in enumerate(node.outputs) if meta is not None]
    yield from enumerate((*made, *node.inputs))
