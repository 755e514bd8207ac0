"""Which part of a backward runs where only some results of the step received a gradient."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..capture import CapturedGraph, Ref


@dataclass(frozen=True)
class GradientFlow:
    """What flows through a backward: ``zeros`` are the tensors that no gradient reaches, ``needed`` are the numbers of
    the operators that some parameter's gradient needs, and ``trained`` names the parameters that get one.
    """

    zeros: frozenset[Ref]
    needed: frozenset[int]
    trained: frozenset[str]


def gradient_flow(graph: CapturedGraph, used: Collection[int]) -> GradientFlow:
    """Follows the gradients of the results numbered ``used`` to the parameters.

    The law is autograd's. An operator of the backward that reads gradients, all of which are absent, does not run, and
    what it makes is absent too: a parameter whose gradient is absent gets None, and infinities among what such an
    operator would have read do no harm. Where some of the gradients that it reads are absent and others are not, the
    absent ones count as zero.
    """
    flowing: set[int] = set()  # the nodes that make gradients, all results of one being alike
    absent: set[int] = set()
    for index, node in enumerate(graph.nodes):
        if node.phase != "backward":
            continue
        read = {ref.node for ref in node.inputs}
        if node.kind == "tangent":
            (flowing if int(node.name.removeprefix("grad.")) in used else absent).add(index)
        elif not read.isdisjoint(flowing):
            flowing.add(index)
        elif not read.isdisjoint(absent):
            absent.add(index)
    present = [(name, ref) for name, ref in graph.gradients if ref.node not in absent]
    needed = {ref.node for _, ref in present}
    for index in reversed(range(len(graph.nodes))):
        if index in needed:
            needed.update(ref.node for ref in graph.nodes[index].inputs if ref.node not in absent)
    zeros = frozenset(Ref(index, k) for index in absent for k in range(len(graph.nodes[index].outputs)))
    return GradientFlow(zeros, frozenset(needed), frozenset(name for name, _ in present))
