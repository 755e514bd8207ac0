"""What a plan does along each mesh axis, in the words of the field: data parallel, fully sharded, tensor parallel.

A parameter is, along one axis, *whole* on every rank; or *gathered*: cut at rest and made whole by an all-gather
before the forward uses it (fully sharded data parallelism, ZeRO-3: https://arxiv.org/abs/1910.02054); or *cut*: used as
it lies (tensor parallelism: https://arxiv.org/abs/1909.08053). Its gradient may be summed over the axis by an
all-reduce or by a reduce-scatter. All of it is read from the redistributions.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Literal

from ...layout import Layout
from ...micro_batches import summed_name
from ...precision import cast_name, reduced_name
from ..dtypes import DTYPE_BYTES
from ..plan import CollectiveKind, Redistribution, ShardingPlan, TensorEntry

Use = Literal["whole", "gathered", "cut"]

SUMMED: Mapping[CollectiveKind, str] = {"all_reduce": "all-reduced", "reduce_scatter": "reduce-scattered"}
"""What is said of a gradient that a collective sums, for example *gradients all-reduced*."""


@dataclass(frozen=True)
class ParameterParallelism:
    """One parameter along one axis: how it is used, the dim it is cut in, and what sums its gradient there."""

    use: Use
    dim: int | None
    summed: CollectiveKind | None

    @property
    def name(self) -> str:
        """What this use is called: ``data parallel``, ``fully sharded`` or ``tensor parallel``; ``replicated`` where no
        gradient is summed either.
        """
        if self.use == "gathered":
            return "fully sharded"
        return "tensor parallel" if self.use == "cut" else "data parallel" if self.summed else "replicated"


class Parallelism:
    """How a plan uses each of its parameters along each mesh axis, read from its redistributions once."""

    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        self._moved: dict[str, list[Redistribution]] = defaultdict(list)
        self._gradients: dict[str, list[Redistribution]] = defaultdict(list)
        copied = {entry.name for entry in plan.operators if len(entry.inputs) == len(entry.outputs) == 1}
        for entry in plan.redistributions:
            if entry.phase == "forward":
                module, slash, _ = entry.tensor.partition("/")
                if not slash:
                    self._moved[entry.tensor].append(entry)
                elif entry.tensor in copied:
                    self._moved[module].append(entry)
            else:
                for name in entry.consumers:
                    self._gradients[name].append(entry)

    def of(self, entry: TensorEntry, axis: str) -> ParameterParallelism:
        """How a parameter is used along the axis of this name."""
        index = self._plan.mesh.index(axis)
        placement = entry.layout[index]
        use: Use = "whole" if placement.kind != "S" else "gathered" if self._is_gathered(entry, index) else "cut"
        takers = entry.name, summed_name(entry.name), reduced_name(entry.name)
        sums = [
            collective.kind
            for taker in takers
            for gradient in self._gradients[taker]
            for collective in gradient.collectives
            if axis in collective.axes and collective.kind in SUMMED and gradient.path[0][index].kind == "P"
        ]
        return ParameterParallelism(use, placement.dim if placement.kind == "S" else None, sums[0] if sums else None)

    def words(self, axis: str) -> str:
        """How parameters are used along an axis: ``data parallel``, or ``60% fully sharded, 40% replicated`` where uses
        are mixed; shares are of the bytes of all parameters.
        """
        weights: Counter[str] = Counter()
        for entry in self._plan.parameters:
            weights[self.of(entry, axis).name] += size_bytes(entry)
        total = sum(weights.values())
        if not total:
            return "no parameters"
        ordered = sorted(weights.items(), key=lambda item: (-item[1], item[0]))
        if ordered[0][1] >= 0.99 * total:
            return ordered[0][0]
        return ", ".join(f"{weight / total:.0%} {name}" for name, weight in ordered if weight >= total / 200)

    def _is_gathered(self, entry: TensorEntry, index: int) -> bool:
        """Whether the forward all-gathers the parameter along an axis, as it is or after a transpose or cast."""
        names = entry.name, entry.name.rpartition(".")[0]
        return any(self._gathers(moved, entry, index) for name in names for moved in self._moved[name])

    def _gathers(self, moved: Redistribution, entry: TensorEntry, index: int) -> bool:
        """Whether a step of a redistribution makes the parameter whole along an axis: a copy is told by its size."""
        axis = self._plan.mesh.axes[index]
        gathered = [
            after for before, after in pairwise(moved.path) if before[index].kind == "S" and after[index].kind == "R"
        ]
        sizes = {c.size_bytes for c in moved.collectives if c.kind == "all_gather" and axis in c.axes}
        if gathered and moved.tensor in (entry.name, cast_name(entry.name)):
            return True
        copied = replace(entry, dtype=self._plan.precision.param_dtype or entry.dtype)
        return any(size_bytes(copied) // self._parts(layout) in sizes for layout in gathered)

    def _parts(self, layout: Layout) -> int:
        shape = self._plan.mesh.shape
        return prod(size for size, placement in zip(shape, layout) if placement.kind == "S")


def size_bytes(entry: TensorEntry) -> int:
    """Bytes of a whole tensor."""
    return prod(entry.shape) * DTYPE_BYTES[entry.dtype]
