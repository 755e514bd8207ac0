"""The graph of a step with a precision policy, from that of the model whose parameters and inputs are cast already.

The model is captured as it computes: with parameters and floating inputs in ``param_dtype``. Here these get their own
dtypes back, and the casts between: those of parameters and inputs before the first operator, so that what is cast can
be gathered ahead; that of a gradient to ``reduce_dtype`` right behind it; and those to the dtypes of parameters behind
all, where every gradient has been reduced (:mod:`autoshard.precision`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ..errors import CaptureError
from ..precision import Precision, cast_name, reduced_name, to_reduce_name
from .graph import CapturedGraph, Node, Phase, Ref, SameTensor, TensorMeta, map_refs

_CAST = torch.ops.aten._to_copy.default


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name: ``bfloat16``."""
    found: torch.dtype = getattr(torch, name)
    return found


def precise(graph: CapturedGraph, precision: Precision, own: Mapping[str, torch.dtype]) -> CapturedGraph:
    """The graph with its casts.

    Args:
        graph: captured with the parameters and floating inputs in ``param_dtype``, if there is one.
        own: the dtypes that the parameters and inputs really have, by name.

    Raises:
        CaptureError: a result of the model is a parameter or an input itself, which would be none but a cast of it.
    """
    for k, constant in enumerate(graph.constants):
        if isinstance(constant, SameTensor) and constant.name in own and not constant.is_copy:
            given = own[constant.name]
            if given.is_floating_point and str(given) != f"torch.{precision.param_dtype}" and precision.param_dtype:
                raise CaptureError(
                    f"result {k} of the model is its {constant.kind} {constant.name} itself, which a step that "
                    f"computes in {precision.param_dtype} reads as a cast of it: return a clone of it, or nothing"
                )
    return _Writer(graph, precision, own).graph()


class _Writer:
    def __init__(self, graph: CapturedGraph, precision: Precision, own: Mapping[str, torch.dtype]) -> None:
        self._graph, self._precision, self._own = graph, precision, own
        self._nodes: list[Node] = []
        self._moved: dict[int, int] = {}
        self._cast: dict[int, int] = {}
        self._gradients: dict[str, Ref] = {}

    def graph(self) -> CapturedGraph:
        graph = self._graph
        first = next((i for i, node in enumerate(graph.nodes) if node.kind == "operator"), len(graph.nodes))
        for index, node in enumerate(graph.nodes):
            if index == first:
                self._cast_leaves()
            self._moved[index] = self._append(self._as_it_is(node))
            if node.phase == "backward":
                self._to_reduce(index)
        self._to_reduce(None)
        self._to_parameters()
        return replace(
            graph,
            nodes=tuple(self._nodes),
            outputs=tuple(ref and self._read(ref) for ref in graph.outputs),
            gradients=tuple((name, self._gradients[name]) for name, _ in graph.gradients),
            mutations=tuple((name, self._read(ref)) for name, ref in graph.mutations),
            precision=self._precision,
        )

    def _as_it_is(self, node: Node) -> Node:
        """A parameter or an input in its own dtype; any other node with its arguments where they stand now."""
        if node.kind in ("parameter", "input"):
            return replace(node, outputs=(replace(_meta(node), dtype=self._own[node.name]),))
        return replace(node, args=map_refs(node.args, self._read), kwargs=map_refs(node.kwargs, self._read))

    def _cast_leaves(self) -> None:
        graph = self._graph
        read = {ref.node for node in graph.nodes for ref in node.inputs}
        read |= {ref.node for ref in (*graph.outputs, *(ref for _, ref in graph.mutations)) if ref is not None}
        for kind in ("parameter", "input"):
            for index, node in graph.of_kind(kind):
                wanted = _meta(node).dtype
                if index in read and wanted != self._own[node.name]:
                    name = cast_name(node.name)
                    self._cast[index] = self._append(_cast(name, "forward", Ref(self._moved[index]), node, wanted))

    def _to_reduce(self, index: int | None) -> None:
        """Appends the casts of the gradients that a node of the backward makes; of all that are left (None)."""
        for name, ref in self._made(index):
            found, given = self._read(ref), self._graph.meta(ref).dtype
            wanted = dtype_of(self._precision.reduce_dtype) if self._precision.reduce_dtype else given
            if given.is_floating_point and wanted != given:
                found = self._cast_of(to_reduce_name(name), found, self._parameters[name], wanted)
            self._gradients[name] = found

    def _made(self, index: int | None) -> Iterator[tuple[str, Ref]]:
        for name, ref in self._graph.gradients:
            if name not in self._gradients and index in (None, ref.node):
                yield name, ref

    def _to_parameters(self) -> None:
        for name, ref in self._gradients.items():
            node, own = self._parameters[name], self._own[name]
            made = self._nodes[ref.node].outputs[ref.output]
            if made is not None and made.dtype != own:
                self._gradients[name] = self._cast_of(reduced_name(name), ref, node, own)

    @property
    def _parameters(self) -> Mapping[str, Node]:
        return {node.name: node for _, node in self._graph.of_kind("parameter")}

    def _cast_of(self, name: str, ref: Ref, parameter: Node, dtype: torch.dtype) -> Ref:
        return Ref(self._append(_cast(name, "backward", ref, parameter, dtype)))

    def _append(self, node: Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1

    def _read(self, ref: Ref) -> Ref:
        """Where a tensor stands now: a parameter or input that is cast is read from its cast."""
        return Ref(self._cast.get(ref.node, self._moved[ref.node]), ref.output)


def _cast(name: str, phase: Phase, ref: Ref, given: Node, dtype: torch.dtype) -> Node:
    meta = replace(_meta(given), dtype=dtype)
    return Node(name, "operator", phase, (meta,), _CAST, (ref,), (("dtype", dtype),), given.source)


def _meta(node: Node) -> TensorMeta:
    (meta,) = node.outputs
    assert meta is not None
    return meta
