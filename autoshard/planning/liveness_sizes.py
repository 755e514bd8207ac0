"""Bytes of tensors on the rank with the largest shards, for every strategy of a solver node at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache

import numpy as np

from solver import Node as SolverNode
from solver.problem import Load

from ..capture import Ref, TensorMeta
from ..layout import Layout, largest_local_shape
from .formulation import Formulation
from .pairs import distinct_layouts


class Sizes:
    """Looks up layouts and bytes, each once: identical layers have the same, and arrays that are shared are cheap."""

    def __init__(self, formulation: Formulation) -> None:
        self._graph, self._strategies = formulation.graph, formulation.strategies
        self._elements = lru_cache(maxsize=None)(
            lambda shape, layout: math.prod(largest_local_shape(shape, layout, formulation.mesh))
        )
        self._layouts: dict[object, tuple[tuple[Layout, ...], np.ndarray]] = {}
        self._bytes: dict[object, np.ndarray] = {}

    def layouts(self, node: int, position: int | None, output: int) -> tuple[tuple[Layout, ...], np.ndarray]:
        """The distinct layouts that the strategies of a solver node give or want, and the number of each strategy's.

        ``position`` None: of the result ``output`` that it makes; otherwise of what it reads there, or holds (HELD).
        """
        key = (id(self._strategies[node]), position, output)
        if key not in self._layouts:
            self._layouts[key] = distinct_layouts(self._strategies[node], position, output)
        return self._layouts[key]

    def bytes(self, meta: TensorMeta, layout: Layout) -> int:
        """Bytes of the largest shard of a tensor."""
        return meta.dtype.itemsize * int(self._elements(meta.shape, layout))

    def of(self, node: int, position: int | None, ref: Ref) -> np.ndarray:
        """Bytes of a tensor in the layout that each strategy of a node gives it (``position`` None), holds or wants."""
        output = ref.output if position is None and node == ref.node else 0
        meta = self._graph.meta(ref)
        key = (id(self._strategies[node]), position, output, meta)
        if key not in self._bytes:
            layouts, index = self.layouts(node, position, output)
            sizes = np.array([self.bytes(meta, layout) for layout in layouts], dtype=np.int64)
            self._bytes[key] = np.asarray(sizes[index])
        return self._bytes[key]

    def of_elements(self, node: int, rule: Callable[[int, int], int]) -> np.ndarray:
        """What ``rule`` makes of the elements of each strategy's largest shard and the bytes of one element."""
        meta = self._graph.meta(Ref(node))
        layouts = (strategy.outputs[0] for strategy in self._strategies[node])
        return np.array([rule(self._elements(meta.shape, layout), meta.dtype.itemsize) for layout in layouts], np.int64)


def with_loads(node: SolverNode, loads: Iterable[Load]) -> SolverNode:
    """A solver node that holds memory; loads of no time or no bytes are left out."""
    held = tuple(load for load in loads if load.interval[0] < load.interval[1] and load.usages.any())
    return SolverNode(node.name, node.costs, further_loads=held) if held else node
