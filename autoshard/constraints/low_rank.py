"""Matrices of low rank, which models write as two: one of few columns, and one that makes many of these."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from ..capture import CapturedGraph, Node, Ref
from ..ops import is_contraction

_TIMES = 4
"""How many times fewer columns than rows the first of them has, and than columns the second."""


def narrowing(graph: CapturedGraph, origins: Mapping[int, int], layered: Mapping[int, str]) -> Iterator[int]:
    """Products of few columns, of which other products of the layer make many again and nothing else is made but what
    is no longer: what adapters, gates and decays of low rank begin with.

    Args:
        origins: parameters and views of them, with the parameter.
        layered: the nodes of layers, with the layer.
    """
    readers: dict[int, set[int]] = defaultdict(set)
    for i, node in graph.of_kind("operator"):
        for ref in node.inputs if node.phase == "forward" else ():
            readers[ref.node].add(i)

    def shape_of(node: Node) -> tuple[int, int]:
        """Rows and columns of the matrix that a product reads; zeros where that reads none."""
        found = [shape for ref in node.inputs if ref.node in origins and len(shape := graph.meta(ref).shape) == 2]
        columns = node.outputs[0].shape[-1] if node.outputs[0] else 0
        return (math.prod(found[0]) // columns, columns) if found and columns else (0, 0)

    def is_widened(product: int) -> bool:
        rows, few = shape_of(graph.nodes[product])
        if not 0 < _TIMES * few <= rows:
            return False
        longest, waiting, seen, again = _length(graph, product), [product], {product}, 0
        while waiting:
            for i in readers[waiting.pop()] - seen:
                seen.add(i)
                if is_contraction(graph.nodes[i]):
                    taken, many = shape_of(graph.nodes[i])
                    is_fine, again = taken == few and many >= _TIMES * few, again + 1
                else:
                    is_fine = _length(graph, i) <= longest
                    waiting.append(i)
                if not is_fine or layered.get(i) != layered.get(product):
                    return False
        return again > 0

    products = (i for i, node in enumerate(graph.nodes) if is_contraction(node) and i in layered)
    return filter(is_widened, products)


def _length(graph: CapturedGraph, index: int) -> int:
    return max(math.prod(graph.meta(Ref(index, k)).shape) for k, meta in enumerate(graph.nodes[index].outputs) if meta)
