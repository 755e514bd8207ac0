"""Every distinct operator of the test models with real values, computed once in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_structure

from autoshard.capture import CapturedGraph, Node, Ref, TensorMeta
from autoshard.strategies import signature

from ..models import EXAMPLES, graph_of
from ..oracles import interpret, run_node, wide


@dataclass(frozen=True, eq=False)
class Subject:
    """An operator as captured, the same in float64, its inputs and its results."""

    graph: CapturedGraph
    node: Node
    wide: Node
    values: list[Tensor]
    expected: list[Tensor | None]

    @property
    def metas(self) -> tuple[TensorMeta, ...]:
        return tuple(self.graph.meta(ref) for ref in self.node.inputs)


@cache
def subjects(name: str) -> tuple[Subject, ...]:
    """The distinct operators of an example. Parameters and tangents are random, so that no value is special."""
    graph = graph_of(name)
    values = interpret(graph, _leaves(name, graph), widen=True)
    found: dict[object, Subject] = {}
    for i, node in graph.of_kind("operator"):
        key = signature(node, tuple(graph.meta(ref) for ref in node.inputs))
        inputs = [values[ref.node, ref.output] for ref in node.inputs]
        results = [values[i, k] for k in range(len(node.outputs))]
        found.setdefault(key, Subject(graph, node, wide(node), inputs, results))  # type: ignore[arg-type]
    return tuple(found.values())


def _leaves(name: str, graph: CapturedGraph) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    model, args = EXAMPLES[name]()
    real = dict(model.named_buffers())
    real |= {node.name: arg for (_, node), arg in zip(graph.of_kind("input"), args)}
    leaves = {}
    for node in graph.nodes:
        if node.kind in ("parameter", "tangent"):
            meta = node.outputs[0]
            assert meta is not None
            leaves[node.name] = torch.randn(meta.shape, generator=generator, dtype=torch.float64)
        elif node.kind != "operator":
            value = real[node.name]
            leaves[node.name] = value.double() if value.is_floating_point() else value
    return leaves


def operator(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> CapturedGraph:
    """The graph of one operator; a :class:`TensorMeta` among the arguments becomes an input."""
    nodes: list[Node] = []

    def place(value: Any) -> Any:
        if isinstance(value, TensorMeta):
            nodes.append(Node(f"x{len(nodes)}", "input", "forward", (value,)))
            return Ref(len(nodes) - 1)
        return tuple(place(item) for item in value) if isinstance(value, (tuple, list)) else value

    placed, named = place(args), tuple((key, place(value)) for key, value in sorted(kwargs.items()))
    metas = [node.outputs[0] for node in nodes]
    node = Node("op", "operator", "forward", (), op, placed, named)
    values = [torch.empty(m.shape, dtype=m.dtype, device="meta") for m in metas if m]
    results = run_node(node, lambda ref: values[ref.node])
    outputs = tuple(None if r is None else TensorMeta(tuple(r.shape), r.dtype) for r in results)
    graph_nodes = (*nodes, replace(node, outputs=outputs))
    return CapturedGraph(graph_nodes, (Ref(len(nodes)),), (None,), (), (), (), (), tree_structure(0))
