"""What the nodes of the program hold: parameters and inputs all the time, results of operators while needed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cost_models import OptimizerPolicy
from solver.problem import Load

from ..capture import CapturedGraph, Ref
from .liveness_moments import Course
from .liveness_sizes import Sizes
from .tensor_networks import HELD, Demand

NodeLoad = tuple[int, Load]
"""A solver node, and what it holds."""


class Read(NamedTuple):
    """An operator that reads a storage: its number, the position among its arguments, and the tensor it reads there."""

    operator: int
    position: int
    tensor: Ref


def lasting_loads(course: Course, policy: OptimizerPolicy, sizes: Sizes) -> Iterator[NodeLoad]:
    """What is held whatever runs: parameters, buffers, inputs, gradients once they are made, the optimizer's state."""
    graph, end = course.graph, course.end
    for kind in ("buffer", "input", "parameter"):
        for i, _ in graph.of_kind(kind):
            yield i, Load((0, end), sizes.of(i, None, Ref(i)))
    parameters = {node.name: i for i, node in graph.of_kind("parameter")}
    for step, (name, ref) in enumerate(graph.gradients):
        i, at = parameters[name], course.optimizer + step
        made = course.delivers(ref.node) + 1 if course.kind(ref.node) == "operator" else course.optimizer
        yield i, Load((made, end), sizes.of(i, None, Ref(i)))
        yield i, Load((0, end), sizes.of_elements(i, policy.state_bytes))
        yield i, Load((at, at + 1), sizes.of_elements(i, policy.step_bytes))


def storage_loads(
    course: Course, demands: Sequence[Demand], sizes: Sizes, keep_activations: bool
) -> Iterator[NodeLoad]:
    """What operators hold of the storages that they make and read.

    Args:
        keep_activations: the backward reads the copies that the forward made; otherwise it makes its own.
    """
    outside = _held_outside(course, demands)
    for storage, reads in _storages(course.graph, course).items():
        yield from _loads_of(storage, reads, outside.get(storage, ()), course, sizes, keep_activations)


def _held_outside(course: Course, demands: Sequence[Demand]) -> dict[Ref, list[int]]:
    """Storages that the world outside of the graph holds, with its nodes: parameters (for gradients) and results."""
    holders: dict[Ref, list[int]] = defaultdict(list)
    for demand in demands:
        for node, position in demand.consumers:
            if position == HELD:
                holders[course.root(demand.ref)].append(node)
    return holders


def _storages(graph: CapturedGraph, course: Course) -> dict[Ref, list[Read]]:
    """Every storage that an operator makes, with its readers in the order in which they run.

    A view has no storage of its own: who reads it reads what it looks at.
    """
    operators = [(i, node) for i, node in graph.of_kind("operator") if i not in course.roots]
    reads: dict[Ref, list[Read]] = {
        Ref(i, k): [] for i, node in operators for k, meta in enumerate(node.outputs) if meta is not None
    }
    for i, node in sorted(operators, key=lambda operator: course.runs(operator[0])):
        first: dict[Ref, Read] = {}
        for position, ref in enumerate(node.inputs):
            first.setdefault(course.root(ref), Read(i, position, ref))
        for root, read in first.items():
            if root in reads:
                reads[root].append(read)
    return reads


def _loads_of(
    storage: Ref, reads: Sequence[Read], holders: Sequence[int], course: Course, sizes: Sizes, keep_activations: bool
) -> Iterator[NodeLoad]:
    # The life of a storage is cut into pieces, and each piece is a load of the one node whose choice says in which
    # layout the tensor lies then. Made by a and read by b, then by c (time to the right):
    #
    #     a's layout      |a runs .......... b's inputs move|
    #     b's layout                                        |b runs|
    #     c's layout                                               |......... c runs|
    #
    # Between two readers the tensor lies as the later one wants it: the copy is made once and kept. Where copies of
    # activations are not kept, and c runs in the backward but b in the forward, it lies there as a made it until c's
    # inputs move, and in c's layout only while c runs. A storage that leaves the graph as a result is held until the
    # end anyway, in the layout of the result; its readers then hold a copy only while they run.
    maker, results = storage.node, [node for node in holders if course.kind(node) != "parameter"]
    until = course.delivers(maker) + 1 if holders else course.runs(maker) + 1
    if reads:
        until = max(until, course.moves(reads[0].operator) + 1)
    yield maker, Load((course.runs(maker), until), sizes.of(maker, None, storage))
    for node in results:
        yield node, Load((course.delivers(maker) + 1, course.end), sizes.of(node, HELD, storage))
    since: int | None = None
    phase = course.graph.nodes[maker].phase
    for reader, position, ref in reads:
        runs, crosses = course.runs(reader), course.graph.nodes[reader].phase != phase
        first = runs if since is None or results else since
        if crosses and not keep_activations and since is not None and not results:
            yield ref.node, Load((since, course.moves(reader) + 1), sizes.of(ref.node, None, ref))
            first = runs
        yield reader, Load((first, runs + 1), sizes.of(reader, position, ref))
        since, phase = runs + 1, course.graph.nodes[reader].phase
