"""Which redistributions the layouts of a plan need, and that the plan lists these, with the bytes that they move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ..capture import CapturedGraph, Ref, TensorMeta
from ..errors import VerificationError
from ..layout import Layout, format_layout
from ..mesh import Mesh
from ..plans import Redistribution, ShardingPlan
from ..redistribution import size_bytes, steps_along

Move = tuple[Ref, str, Layout, Layout]
"""A tensor, a phase, the layout it has and the layout wanted."""


def check_redistributions(plan: ShardingPlan, graph: CapturedGraph) -> None:
    """Checks that a plan redistributes what its layouts need, for those that want it, and nothing else.

    Args:
        graph: the one that the plan was made for.

    Raises:
        VerificationError: a redistribution is missing, is too many, or names other consumers, collectives or bytes than
            its path and its tensor give.
    """
    needed = _needed(plan, graph)
    listed: set[Move] = set()
    refs = {graph.tensor_name(ref): ref for ref, *_ in needed}
    for entry in plan.redistributions:
        ref = refs.get(entry.tensor)
        move = (ref, entry.phase, entry.path[0], entry.path[-1])
        if ref is None or move not in needed:
            raise VerificationError(f"the plan has a redistribution of {_text(entry, plan)}, which nothing wants")
        if entry.consumers and set(entry.consumers) != needed[move]:
            raise VerificationError(
                f"the plan has the redistribution of {_text(entry, plan)} for {', '.join(entry.consumers)}, but "
                f"{', '.join(sorted(needed[move]))} want it"
            )
        _check_collectives(entry, plan, graph, ref)
        listed.add(move)
    for ref, phase, have, want in needed.keys() - listed:
        raise VerificationError(
            f"the plan has no redistribution of {graph.tensor_name(ref)} from {format_layout(have, plan.mesh)} to "
            f"{format_layout(want, plan.mesh)} in the {phase}, but its operators need one"
        )


def _check_collectives(entry: Redistribution, plan: ShardingPlan, graph: CapturedGraph, ref: Ref) -> None:
    right = sent_along(entry, plan.mesh, graph.meta(ref))
    said = [(collective.kind, collective.axis, collective.size_bytes) for collective in entry.collectives]
    if said != right:
        texts = (
            ", ".join(f"{kind} over {axis} of {size} bytes" for kind, axis, size in those) for those in (said, right)
        )
        found, wanted = (text or "nothing" for text in texts)
        raise VerificationError(
            f"the redistribution of {_text(entry, plan)} does not communicate as planned: the plan says {found}, its "
            f"path takes {wanted}"
        )


def sent_along(entry: Redistribution, mesh: Mesh, meta: TensorMeta) -> list[tuple[str, str, int]]:
    """The collectives of a redistribution's own steps for a tensor: kind, axis and bytes."""
    return [
        (step.kind, mesh.named(step.axes), size_bytes(step, before, meta.shape, meta.dtype.itemsize, mesh))
        for step, before in zip(steps_along(entry.own), entry.own)
        if step.communicates
    ]


def _text(entry: Redistribution, plan: ShardingPlan) -> str:
    first, last = (format_layout(layout, plan.mesh) for layout in (entry.path[0], entry.path[-1]))
    return f"{entry.tensor} from {first} to {last} in the {entry.phase}"


def _needed(plan: ShardingPlan, graph: CapturedGraph) -> dict[Move, set[str]]:
    """Every move that some consumer needs, with the names of its consumers."""
    held = _layouts(plan, graph)
    needed: dict[Move, set[str]] = defaultdict(set)
    for ref, phase, want, consumer in _wanted(plan, graph):
        if held[ref] != want:
            needed[ref, phase, held[ref], want].add(consumer)
    return needed


def _layouts(plan: ShardingPlan, graph: CapturedGraph) -> dict[Ref, Layout]:
    """The layout in which every tensor of the graph is made."""
    operators = {entry.name: entry for entry in plan.operators}
    leaves = {entry.name: entry.layout for entry in (*plan.parameters, *plan.buffers, *plan.inputs)}
    leaves |= {f"grad.{entry.name.removeprefix('output.')}": entry.layout for entry in plan.outputs}
    layouts: dict[Ref, Layout] = {}
    for i, node in enumerate(graph.nodes):
        made = operators[node.name].outputs if node.kind == "operator" else (leaves[node.name],)
        layouts.update((Ref(i, k), layout) for k, layout in enumerate(made) if layout is not None)
    return layouts


def _wanted(plan: ShardingPlan, graph: CapturedGraph) -> Iterator[tuple[Ref, str, Layout, str]]:
    """Every tensor that is wanted: in which phase, in which layout, and by whom."""
    operators = {entry.name: entry for entry in plan.operators}
    held = {entry.name: entry.layout for entry in (*plan.parameters, *plan.buffers)}
    outputs = {entry.name: entry.layout for entry in plan.outputs}
    for _, node in graph.of_kind("operator"):
        for ref, layout in zip(node.inputs, operators[node.name].inputs, strict=True):
            yield ref, node.phase, layout, node.name
    for name, ref in graph.gradients:
        if graph.nodes[ref.node].name != name:  # a parameter may be its own gradient
            yield ref, "backward", held[name], name
    for k, output in enumerate(graph.outputs):
        if output is not None:
            yield output, "forward", outputs[f"output.{k}"], f"output.{k}"
    for name, ref in graph.mutations:
        yield ref, "forward", held[name], name
