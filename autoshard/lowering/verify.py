"""Compares the collectives of a lowered program with those of its plan: kind, axis, bytes and count, phase by phase."""

from __future__ import annotations

from collections import Counter
from typing import cast

from torch import fx

from ..errors import VerificationError
from ..plans import ShardingPlan
from .adapter import COLLECTIVES, is_collective
from .local_program import LocalProgram

Key = tuple[str, str, int]


def verify(program: LocalProgram, plan: ShardingPlan, groups: tuple[str, ...], whole: bool = True) -> None:
    """Checks that a program does what its plan says.

    The bytes are those of the values in the graph, worked out by torch as the graph was written.

    Args:
        groups: the name of the process group along each mesh axis.
        whole: whether nothing may be missing: not so for a backward that only some results need.

    Raises:
        VerificationError: a collective is missing, is too many, or differs; the message names the first ones.
    """
    axes = dict(zip(groups, plan.mesh.axes))
    planned: dict[str, Counter[Key]] = {"forward": Counter(), "backward": Counter()}
    once: dict[str, Counter[Key]] = {"forward": Counter(), "backward": Counter()}
    for entry in plan.redistributions:
        is_once = plan.micro_batches > 1 and plan.runs(entry) == 1
        for collective in entry.collectives:
            key = collective.kind, collective.axis, collective.size_bytes
            (once if is_once else planned)[entry.phase][key] += 1
    for phase, modules in (("forward", program.once.gathers), ("backward", program.once.reductions)):
        found = sum((collectives_of(module.graph, axes) for module in modules.values()), Counter[Key]())
        if found != once[phase]:
            raise VerificationError(_difference(f"{phase} that is run once in a step", once[phase], found))
    for phase, module in (("forward", program.forward), ("backward", program.backward)):
        found = collectives_of(module.graph, axes) if module is not None else Counter()
        if found - planned[phase] or (whole and found != planned[phase]):
            raise VerificationError(_difference(phase, planned[phase], found))


def collectives_of(graph: fx.Graph, axes: dict[str, str]) -> Counter[Key]:
    """The collectives of a graph, as (kind, axis, bytes of the larger buffer); ``axes`` names the axis of each group.

    Raises:
        VerificationError: the graph has a collective that no plan can have.
    """
    found: Counter[Key] = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and is_collective(node.target):
            if node.target not in COLLECTIVES or node.args[-1] not in axes:
                raise VerificationError(f"the lowered graph runs {node.format_node()}, which no plan contains")
            found[COLLECTIVES[node.target], axes[node.args[-1]], _largest(node)] += 1
    return found


def _largest(node: fx.Node) -> int:
    values = (node.meta["val"], cast(fx.Node, node.args[0]).meta["val"])
    return max(int(value.numel() * value.element_size()) for value in values)


def _difference(phase: str, planned: Counter[Key], found: Counter[Key]) -> str:
    missing, extra = planned - found, found - planned
    parts = []
    for what, counter in (("planned but not in the graph", missing), ("in the graph but not planned", extra)):
        listed = [f"{n} x {kind} over {axis} of {size} bytes" for (kind, axis, size), n in sorted(counter.items())[:5]]
        if listed:
            parts.append(f"{what}: {', '.join(listed)}")
    return f"the {phase} of the lowered graph does not communicate as planned; " + "; ".join(parts)
