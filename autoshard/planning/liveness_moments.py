"""When things happen in a training step, as the integer program counts time, and who reads what.

Time runs in steps of the program: three for each operator in the order of execution (the forward, then the backward),
then one for the optimizer's work on each parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..capture import CapturedGraph, Ref
from ..ops import is_free
from .tensor_networks import HELD, Demand

Interval = tuple[int, int]
"""Time steps from the first up to, but without, the last."""


@dataclass(frozen=True, eq=False)
class Course:
    """The course of one training step.

    With two operators and one parameter the steps are 0 (inputs of the first move), 1 (it runs), 2 (its results for the
    world outside move), 3 to 5 the same of the second, 6 (the parameter's step); ``optimizer`` is 6 and ``end`` 7.

    Attributes:
        graph: what runs.
        first: operator -> its first time step.
        optimizer: the first time step of the optimizer.
        end: how many time steps there are.
        roots: an operator that only looks at its input -> the tensor whose storage it looks at.
        consumers: (node, phase) -> who reads its results in that phase: (node, position among its tensor arguments).
    """

    graph: CapturedGraph
    first: Mapping[int, int]
    optimizer: int
    end: int
    roots: Mapping[int, Ref]
    consumers: Mapping[tuple[int, str], Sequence[tuple[int, int]]]

    def moves(self, operator: int) -> int:
        """The time step in which the inputs of an operator move to the layouts it wants."""
        return self.first[operator]

    def runs(self, operator: int) -> int:
        """The time step in which an operator runs."""
        return self.first[operator] + 1

    def delivers(self, operator: int) -> int:
        """The time step in which an operator's results for the world outside move there."""
        return self.first[operator] + 2

    def kind(self, node: int) -> str:
        """The kind of a solver node: of the graph's node, or ``result`` for a tensor that leaves the graph."""
        return self.graph.nodes[node].kind if node < len(self.graph.nodes) else "result"

    def root(self, ref: Ref) -> Ref:
        """The tensor whose storage a tensor lies in: itself, unless it is a view."""
        return self.roots.get(ref.node, ref)

    def last_read(self, reader: int) -> int:
        """The time step after the last operator that reads what ``reader`` took: itself, or one that reads a view that
        it makes of it.
        """
        last = self.runs(reader) + 1
        if is_free(self.graph.nodes[reader]):
            for node, position in self.consumers.get((reader, self.graph.nodes[reader].phase), ()):
                if position != HELD:
                    last = max(last, self.last_read(node))
        return last


def course_of(graph: CapturedGraph, demands: Sequence[Demand]) -> Course:
    """When each operator of a graph runs and each tensor is last read, where ``demands`` says who reads it."""
    operators = [i for i, _ in graph.of_kind("operator")]
    operators.sort(key=lambda i: (graph.nodes[i].phase != "forward", i))
    optimizer = 3 * len(operators)
    consumers: dict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for demand in demands:
        consumers[demand.ref.node, demand.phase] += demand.consumers
    roots: dict[int, Ref] = {}
    for i, node in graph.of_kind("operator"):
        if is_free(node) and node.inputs:
            roots[i] = roots.get(node.inputs[0].node, node.inputs[0])
    return Course(
        graph=graph,
        first={i: 3 * k for k, i in enumerate(operators)},
        optimizer=optimizer,
        end=optimizer + max(1, len(graph.gradients)),
        roots=roots,
        consumers=consumers,
    )
