"""What a step of several micro-batches does once: the copies that it holds of parameters, and gradients out of sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from ..capture import CapturedGraph, Ref
from ..errors import VerificationError
from ..layout import Layout, format_layout
from ..micro_batches import is_held, is_summed
from ..plans import ShardingPlan
from ..redistribution.execution import Shard, run_step
from .emitter import GraphEmitter, LocalGraph
from .owned import owned
from .rank import Rank

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class OnceAStep:
    """Graphs of one tensor each, in a list that they empty.

    ``gathers`` make the copy of a parameter of its shard, by the name of the parameter; ``reductions`` its gradient of
    the sum of its gradients. Parameters whose copy or sum lies as they do are not among them. ``operators`` are the
    nodes of the graph that stand for copies and sums.
    """

    gathers: Mapping[str, LocalGraph]
    reductions: Mapping[str, LocalGraph]
    operators: frozenset[int]


def once_a_step(graph: CapturedGraph, plan: ShardingPlan, rank: Rank) -> OnceAStep:
    """Writes what one rank does once in a step; nothing for a step of one micro-batch.

    Raises:
        VerificationError: the plan lacks a redistribution that its layouts need.
    """
    if graph.micro_batches == 1:
        return OnceAStep({}, {}, frozenset())
    stored = {entry.name: entry.layout for entry in plan.parameters}
    layouts = {entry.name: entry.inputs[0] for entry in plan.operators if is_held(entry.name) or is_summed(entry.name)}
    copies = {i: node for i, node in graph.of_kind("operator") if is_held(node.name)}
    writer = _Writer(graph, plan, rank)
    gathers, reductions = {}, {}
    for node in copies.values():
        ref = node.inputs[0]
        name = graph.nodes[ref.node].name
        if stored[name] != layouts[node.name]:
            gathers[name] = writer.taken(ref, "forward", stored[name], layouts[node.name], node.name)
    for name, ref in graph.gradients:
        total = graph.nodes[ref.node].name
        if stored[name] != layouts[total]:
            reductions[name] = writer.taken(ref, "backward", layouts[total], stored[name], total)
    return OnceAStep(gathers, reductions, frozenset({*copies, *(ref.node for _, ref in graph.gradients)}))


class _Writer:
    def __init__(self, graph: CapturedGraph, plan: ShardingPlan, rank: Rank) -> None:
        self._graph, self._mesh, self._rank = graph, plan.mesh, rank
        self._paths = {(r.tensor, r.phase, r.path[0], r.path[-1]): r.path for r in plan.redistributions}

    def taken(self, ref: Ref, phase: str, have: Layout, wanted: Layout, operator: str) -> LocalGraph:
        """A graph that takes a tensor to a layout, and nothing else, as part of an operator."""
        name, meta = self._graph.tensor_name(ref), self._graph.meta(ref)
        shard = Shard(meta.shape, self._mesh, self._rank.coordinate)
        emitter = GraphEmitter(self._mesh, self._rank.groups)
        value = emitter.placeholder(
            "shard", torch.empty(shard.local(have), dtype=meta.dtype, device=self._rank.device), name
        )
        emitter.begin(operator)
        with emitter.copying(operator):
            for before, after in pairwise(self._path(name, phase, have, wanted)):
                value = run_step(emitter, value, before, after, shard)
            results = owned(emitter, [emitter.call(aten.contiguous.default, value)])
        return emitter.finish(tuple(results), "OnceAStep")

    def _path(self, name: str, phase: str, have: Layout, wanted: Layout) -> tuple[Layout, ...]:
        path = self._paths.get((name, phase, have, wanted))  # type: ignore[arg-type]
        if path is None:
            texts = (format_layout(layout, self._mesh) for layout in (have, wanted))
            raise VerificationError(
                f"the plan has no redistribution of {name} from {' to '.join(texts)} in the {phase}, but a step of "
                f"{self._graph.micro_batches} micro-batches needs one"
            )
        return path
