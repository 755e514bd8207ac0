"""Cuts of dims in parts that a scheme asks for, and no operator of a graph: who has a plan with them may have them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..capture import CapturedGraph, Node, Ref
from ..layout import Layout, Placement
from ..ops import are_rows_of, batches_joined, has, is_causal_attention, parts_asked_for
from .enumerate import Strategy

Asked = tuple[tuple[Ref, Placement], ...]
"""Of which tensors, and how they are cut."""


def asked_by(graph: CapturedGraph, chosen: Mapping[str, Strategy]) -> Asked:
    """Those of a plan: of inputs, of the queries of causal attention, and of batch and sequence taken as one dim.

    Args:
        chosen: what the plan gives operators and inputs, by name.
    """
    found: dict[tuple[Ref, Placement], None] = {}
    for i, node in enumerate(graph.nodes):
        if node.name in chosen:
            for ref, layout in _may_be_asked(graph, i, node, chosen[node.name]):
                before_features = max(len(graph.meta(ref).shape) - 1, 1)
                parts = (placement for placement in layout or () if placement.parts)
                found.update(((ref, placement), None) for placement in parts if placement.dim < before_features)
    own = {*(each[:2] for each in parts_asked_for(graph)), *batches_joined(graph)} if found else set()
    return tuple(asked for asked in found if asked not in own)


def _may_be_asked(
    graph: CapturedGraph, index: int, node: Node, chosen: Strategy
) -> Iterator[tuple[Ref, Layout | None]]:
    if node.kind == "input":
        yield Ref(index), chosen.outputs[0]
    elif node.phase == "forward" and is_causal_attention(node):
        yield node.inputs[0], chosen.inputs[0]
    elif node.phase == "forward" and has(node, "reshape"):
        before, after = graph.meta(node.inputs[0]).shape, graph.meta(Ref(index)).shape
        if are_rows_of(after, before):
            yield Ref(index), chosen.outputs[0]
        if are_rows_of(before, after):
            yield node.inputs[0], chosen.inputs[0]
