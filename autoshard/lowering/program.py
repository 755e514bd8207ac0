"""From a graph and a plan to what one rank runs: a forward and a backward graph on its shards.

The forward takes the shards of parameters, buffers and inputs and returns the results and what the backward needs; the
backward takes that and the tangents and returns the gradients. Every redistribution is one of the plan's.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from ..capture import CapturedGraph, Node, Ref, is_random
from ..errors import VerificationError
from ..layout import Layout, format_layout
from ..localize import run_local
from ..plans import OperatorEntry, ShardingPlan
from ..redistribution import Shard, run_step
from .emitter import GraphEmitter

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class LocalProgram:
    """What one rank runs.

    ``forward`` takes the tensors named ``arguments`` and returns ``results`` leaves, then the new values of the buffers
    named ``mutated``, then what is saved. ``backward`` (None for inference) takes what was saved, then the tangents of
    the results numbered ``tangents``, and returns the gradients of the parameters named ``trained``. ``is_random`` says
    that some operator draws random numbers; as such operators run replicated, every rank must draw the same.
    """

    arguments: tuple[str, ...]
    forward: fx.GraphModule
    results: int
    mutated: tuple[str, ...]
    backward: fx.GraphModule | None
    tangents: tuple[int, ...]
    trained: tuple[str, ...]
    is_random: bool


@dataclass(frozen=True)
class Rank:
    """One rank of a job: its coordinate on the mesh, its device, and the name of its process group along each axis."""

    coordinate: tuple[int, ...]
    device: torch.device
    groups: tuple[str, ...]


def lower(graph: CapturedGraph, plan: ShardingPlan, rank: Rank) -> LocalProgram:
    """Writes the local program of one rank.

    Args:
        graph: the graph the plan was made for.
        rank: its device takes the place of every device in the graph.

    Raises:
        VerificationError: the plan lacks a redistribution that its layouts need, or an operator on shards gives
            another shape than the plan says.
    """
    return _Lowering(graph, plan, rank).run()


class _Lowering:
    def __init__(self, graph: CapturedGraph, plan: ShardingPlan, rank: Rank) -> None:
        self._graph, self._mesh, self._coordinate, self._device = graph, plan.mesh, rank.coordinate, rank.device
        self._operators = {entry.name: entry for entry in plan.operators}
        self._held = {e.name: e.layout for e in (*plan.parameters, *plan.buffers, *plan.inputs)}
        self._outputs = {entry.name: entry.layout for entry in plan.outputs}
        self._paths = {(r.tensor, r.phase, r.path[0], r.path[-1]): r.path for r in plan.redistributions}
        self._emitters = {phase: GraphEmitter(plan.mesh, rank.groups) for phase in ("forward", "backward")}
        self._values: dict[tuple[Ref, str], fx.Node] = {}
        self._moved: dict[tuple[Ref, str, Layout], fx.Node] = {}
        self._saved: dict[Ref, None] = {}

    def run(self) -> LocalProgram:
        self._add_saved_placeholders()
        arguments = [self._add_input(i, node) for i, node in enumerate(self._graph.nodes) if node.kind != "operator"]
        for i, node in self._graph.of_kind("operator"):
            self._add_operator(i, node)
        forward = self._finish("forward", self._results())
        trained = tuple(name for name, _ in self._graph.gradients)
        backward = self._finish("backward", self._gradients()) if trained else None
        return LocalProgram(
            arguments=tuple(name for name in arguments if name is not None),
            forward=forward,
            results=len(self._graph.outputs),
            mutated=tuple(name for name, _ in self._graph.mutations),
            backward=backward,
            tangents=tuple(int(n.name.removeprefix("grad.")) for _, n in self._graph.of_kind("tangent")),
            trained=trained,
            is_random=any(is_random(node) for _, node in self._graph.of_kind("operator")),
        )

    def _layout(self, ref: Ref) -> Layout:
        """The layout a tensor is made in."""
        node = self._graph.nodes[ref.node]
        if node.kind == "operator":
            layout = self._operators[node.name].outputs[ref.output]
            assert layout is not None
            return layout
        if node.kind == "tangent":
            return self._outputs[f"output.{node.name.removeprefix('grad.')}"]
        return self._held[node.name]

    def _shard(self, ref: Ref) -> Shard:
        return Shard(self._graph.meta(ref).shape, self._mesh, self._coordinate)

    def _local_shape(self, ref: Ref) -> tuple[int, ...]:
        return self._shard(ref).local(self._layout(ref))

    def _add_saved_placeholders(self) -> None:
        """What the backward reads of the forward, first among its inputs."""
        for node in self._graph.nodes:
            if node.kind == "operator" and node.phase == "backward":
                for ref in node.inputs:
                    if self._graph.nodes[ref.node].phase == "forward" and ref not in self._saved:
                        self._saved[ref] = None
        for _, ref in self._graph.gradients:
            if self._graph.nodes[ref.node].phase == "forward":
                self._saved[ref] = None
        for ref in self._saved:
            self._placeholder("backward", self._graph.tensor_name(ref), ref)

    def _add_input(self, index: int, node: Node) -> str | None:
        self._placeholder(node.phase, node.name, Ref(index))
        return node.name if node.phase == "forward" else None

    def _placeholder(self, phase: str, name: str, ref: Ref) -> None:
        emitter = self._emitters[phase]
        identifier = _identifier(name)
        dtype = self._graph.meta(ref).dtype
        self._values[ref, phase] = emitter.placeholder(identifier, self._local_shape(ref), dtype)

    def _add_operator(self, index: int, node: Node) -> None:
        entry, emitter = self._operators[node.name], self._emitters[node.phase]
        values = tuple(self._moved_to(ref, node.phase, layout) for ref, layout in zip(node.inputs, entry.inputs))
        metas = tuple(self._graph.meta(ref) for ref in node.inputs)
        result = run_local(
            emitter, node, values, metas, entry.inputs, entry.outputs, self._mesh, self._coordinate, self._device
        )
        several = len(node.outputs) > 1 or isinstance(result.meta["val"], (tuple, list))
        for k, meta in enumerate(node.outputs):
            if meta is not None:
                value = emitter.item(result, k) if several else result
                self._values[Ref(index, k), node.phase] = value
                self._check_shape(Ref(index, k), value, entry)

    def _check_shape(self, ref: Ref, value: fx.Node, entry: OperatorEntry) -> None:
        found, planned = tuple(value.meta["val"].shape), self._local_shape(ref)
        if found != planned:
            raise VerificationError(
                f"{entry.name} on the shards of the rank at {self._coordinate} gives shape {list(found)}; its planned "
                f"layout {format_layout(self._layout(ref), self._mesh)} needs {list(planned)}"
            )

    def _moved_to(self, ref: Ref, phase: str, wanted: Layout) -> fx.Node:
        """The tensor in the layout wanted; redistributed once per phase."""
        have = self._layout(ref)
        if have == wanted:
            return self._values[ref, phase]
        key = (ref, phase, wanted)
        if key not in self._moved:
            name = self._graph.tensor_name(ref)
            path = self._paths.get((name, phase, have, wanted))  # type: ignore[arg-type]
            if path is None:
                raise VerificationError(
                    f"the plan has no redistribution of {name} from {format_layout(have, self._mesh)} to "
                    f"{format_layout(wanted, self._mesh)} in the {phase}, but its operators need one"
                )
            value = self._values[ref, phase]
            for before, after in pairwise(path):
                value = run_step(self._emitters[phase], value, before, after, self._shard(ref))
            self._moved[key] = value
        return self._moved[key]

    def _results(self) -> list[Any]:
        outputs = [
            constant if ref is None else self._output(k, ref)
            for k, (ref, constant) in enumerate(zip(self._graph.outputs, self._graph.constants))
        ]
        mutated = [self._moved_to(ref, "forward", self._held[name]) for name, ref in self._graph.mutations]
        return [*outputs, *mutated, *(self._values[ref, "forward"] for ref in self._saved)]

    def _output(self, index: int, ref: Ref) -> fx.Node:
        """Contiguous, as the strides of the DTensor it becomes say."""
        moved = self._moved_to(ref, "forward", self._outputs[f"output.{index}"])
        return self._emitters["forward"].call(aten.contiguous.default, moved)

    def _gradients(self) -> list[Any]:
        """Contiguous, as the strides of the DTensors they become say."""
        gradients = [self._moved_to(ref, "backward", self._held[name]) for name, ref in self._graph.gradients]
        return [self._emitters["backward"].call(aten.contiguous.default, gradient) for gradient in gradients]

    def _finish(self, phase: str, outputs: list[Any]) -> fx.GraphModule:
        graph = self._emitters[phase].graph
        graph.output(tuple(outputs))
        graph.lint()
        return fx.GraphModule(torch.nn.Module(), graph, class_name=phase.capitalize())


def _identifier(name: str) -> str:
    text = re.sub(r"\W", "_", name)
    return f"_{text}" if text[:1].isdigit() or keyword.iskeyword(text) else text
