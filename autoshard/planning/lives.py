"""What every choice and every copy of the program holds in memory, and when.

Time runs in one step for each operator in the order of execution, from 1, the forward first, and then one for the
optimizer's work on each parameter. Of several micro-batches it is the last one that is followed, behind the steps that
make the copies that are held over all; between the backward and the optimizer is one step for the gradient of each
parameter, which is made of the sum over the micro-batches. Bytes are those of the rank with the largest shards:

=======================  =========================================================================================
parameters, inputs,      the shard and, of what is trained, the optimizer's state: always; the copies of the
buffers                  optimizer's step: at the step of the parameter; what that leaves behind: at the next one
tensors of operators     every copy in every layout, from the operator before which it is made to the last one that
                         reads it, or before which another copy is made of it; what the backward reads of the
                         forward is held in between
gradients, results       the copy in the layout in which it is delivered: to the end
held copies              from before the first operator that reads one to the end of the backward
sums of gradients        from the first operator on to the step that makes the gradient of them
views                    nothing of their own; they hold what they look at
results nobody reads     while their operator runs
parts of an operator     nothing: numbers for rows, and where the operator is one kernel not even these
=======================  =========================================================================================

A plan's timeline (:mod:`autoshard.planning.timeline`) never holds less: it has the same tensors, and besides what moves
while a collective runs, padding of uneven shards, and copies that are made to be contiguous. So the least cost under a
budget of the program is a bound for all plans that fit it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from cost_models import OptimizerPolicy
from solver import Assignment, Base, Life, Load, Network, Problem, usage_at, usage_timeline
from solver import Node as SolverNode

from ..capture import CapturedGraph, Ref, TensorMeta
from ..layout import Layout, largest_local_shape
from ..lowering.flow import gradient_flow
from ..micro_batches import is_held, is_summed
from ..ops import is_free, is_part
from ..plans.schedule import Schedule
from .formulation import Formulation
from .tensor_networks import HELD, TensorNetwork, layout_of
from .timeline import OPTIMIZER_STEP, Timeline

UNSCHEDULED = Schedule()


def with_lives(formulation: Formulation, policy: OptimizerPolicy, schedule: Schedule = UNSCHEDULED) -> Formulation:
    """The same program, in which choices and copies hold memory; the limit itself is ``problem.usage_limit``.

    Args:
        policy: of the optimizer, whose state counts.
        schedule: what sets out when in an answer: so do parameters and gradients here. A program with one is no bound
            for plans with others.
    """
    sizes, course = _Sizes(formulation), _Course.of(formulation.graph)
    loads: dict[int, list[Load]] = defaultdict(list)
    for node, load in _loads(formulation, policy, sizes, course):
        loads[node].append(load)
    nodes = tuple(
        SolverNode(node.name, node.costs, further_loads=tuple(loads[i])) if loads[i] else node
        for i, node in enumerate(formulation.free.nodes)
    )
    networks = tuple(_networks(formulation, sizes, course, _Setting.out(schedule, formulation.graph, course)))
    return replace(formulation, problem=replace(formulation.free, nodes=nodes, networks=networks))


def with_charges(program: Formulation, charges: Mapping[int, int]) -> Problem:
    """The problem of a program that counts memory, with bytes that are held at steps whatever is chosen."""
    if not charges:
        return program.problem
    first, *others = program.problem.nodes
    held = [Load((step, step + 1), np.full(len(first.costs), size, np.int64)) for step, size in sorted(charges.items())]
    charged = SolverNode(first.name, first.costs, further_loads=(*first.loads, *held))
    return replace(program.problem, nodes=(charged, *others))


def uncounted(program: Formulation, assignment: Assignment, timeline: Timeline) -> dict[int, int]:
    """Step -> bytes that the timeline of an answer's plan has, and the program that counts memory does not."""
    graph, course = program.graph, _Course.of(program.graph)
    steps: dict[tuple[str, str], range] = {("optimizer", OPTIMIZER_STEP): range(course.optimizer, course.end)}
    steps |= {(graph.nodes[i].phase, graph.nodes[i].name): range(k, k + 1) for i, k in course.step.items()}
    counted = usage_timeline(program.problem, *assignment)
    within, found = range(1), dict[int, int]()
    for point in timeline.points:
        # what is made for the world outside stands behind an operator
        within = steps.get((point.phase, point.operator), within)
        most = max(usage_at(counted, step) for step in within)
        if point.size_bytes > most:
            found |= dict.fromkeys(within, point.size_bytes - most)
    return found


@dataclass(frozen=True, eq=False)
class _Course:
    """When things run. With two operators and three parameters the steps are 1 and 2, and 3 to 5 of the optimizer; what
    is there before is there from step 0 on.

    Attributes:
        step: operator -> its step; of a sum of gradients the one that makes the gradient of it.
        first: the first step behind those that make held copies.
        turn: the first step of the backward.
        over: the first step behind the backward.
        optimizer: the first step of the optimizer.
        end: how many steps there are.
        unknown: nodes of whose results it depends on the gradients that arrive whether and when they exist.
    """

    step: dict[int, int]
    first: int
    turn: int
    over: int
    optimizer: int
    end: int
    unknown: frozenset[int]

    @classmethod
    def of(cls, graph: CapturedGraph) -> _Course:
        several = graph.micro_batches > 1
        sums = [ref.node for _, ref in graph.gradients] if several else []
        copies = sum(several and is_held(node.name) for _, node in graph.of_kind("operator"))
        running = (found for found in graph.of_kind("operator") if found[0] not in frozenset(sums))
        operators = sorted((node.phase != "forward", i) for i, node in running)
        tangents = [int(node.name.removeprefix("grad.")) for _, node in graph.of_kind("tangent")]
        flow = gradient_flow(graph, tangents)
        unneeded = {i for late, i in operators if late and i not in flow.needed}
        unknown = unneeded | {ref.node for ref in flow.zeros}
        unknown |= {i for _, i in operators if any(ref in flow.zeros for ref in graph.nodes[i].inputs)}
        unknown |= {ref.node for i in unneeded for ref in graph.nodes[i].inputs}
        return cls(
            step={i: k for k, i in enumerate([*(i for _, i in operators), *sums], 1)},
            first=1 + copies,
            turn=1 + sum(not late for late, _ in operators),
            over=1 + len(operators),
            optimizer=1 + len(operators) + len(sums),
            end=1 + len(operators) + len(sums) + max(1, len(graph.gradients)),
            unknown=frozenset(unknown),
        )


@dataclass(frozen=True)
class _Setting:
    """Steps before which tensors set out on their way: to operators, by name and phase; to parameters, by theirs."""

    to_operators: Mapping[tuple[str, str], int]
    to_parameters: Mapping[str, int]

    @classmethod
    def out(cls, schedule: Schedule, graph: CapturedGraph, course: _Course) -> _Setting:
        steps = {graph.nodes[i].name: step for i, step in course.step.items()}
        parameters = {node.name for _, node in graph.of_kind("parameter")}
        to_operators: dict[tuple[str, str], int] = {}
        to_parameters: dict[str, int] = {}
        for bucket in schedule.buckets:
            if bucket.is_early:
                continue  # both its buffers are held until it arrives: more than the copy that is made there
            over = course.turn if bucket.phase == "forward" else course.over
            first, last = (steps.get(travel.sets_out, over) for travel in (bucket.travels[0], bucket.travels[-1]))
            for member in bucket.members:
                if parameters.intersection(member.consumers):
                    to_parameters[member.consumers[0]] = first  # until then it is whole
                else:
                    to_operators[member.tensor, bucket.phase] = last  # from then on it is
        return cls(to_operators, to_parameters)


class _Sizes:
    """Bytes of tensors on the rank with the largest shards; equal arrays are one object."""

    def __init__(self, formulation: Formulation) -> None:
        self._strategies, self._graph = formulation.strategies, formulation.graph
        self._twice = formulation.twice
        self._elements = lru_cache(maxsize=None)(
            lambda shape, layout: math.prod(largest_local_shape(shape, layout, formulation.mesh))
        )
        self._arrays: dict[object, np.ndarray] = {}

    def of_layouts(self, meta: TensorMeta, layouts: tuple[Layout, ...]) -> np.ndarray:
        """Bytes in each layout."""
        key = meta.shape, meta.dtype, layouts
        if key not in self._arrays:
            elements = [self._elements(meta.shape, layout) for layout in layouts]
            self._arrays[key] = meta.dtype.itemsize * np.array(elements, np.int64)
        return self._arrays[key]

    def made(self, ref: Ref) -> np.ndarray:
        """Bytes of a result under each choice of the node that makes it."""
        layouts = (layout_of(strategy, None, ref.output) for strategy in self._strategies[ref.node])
        found = self.of_layouts(self._graph.meta(ref), tuple(layouts))
        return np.tile(found, 2) if ref.node in self._twice else found

    def made_again(self, ref: Ref) -> np.ndarray:
        """Bytes of a result of an operator that may be computed again, under each of its choices with that."""
        found = self.made(ref).copy()
        found[: len(found) // 2] = 0
        return found

    def of_optimizer(self, node: int, policy: OptimizerPolicy) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Bytes of a parameter's state, of the copies of its step, and of what that leaves behind, under each of its
        strategies.
        """
        meta = self._graph.meta(Ref(node))
        elements = [self._elements(meta.shape, layout_of(strategy, None)) for strategy in self._strategies[node]]
        state, step, left = (
            np.array([rule(count, meta.dtype.itemsize) for count in elements], np.int64)
            for rule in (policy.state_bytes, policy.step_bytes, policy.left_bytes)
        )
        return state, step, left


def _loads(
    formulation: Formulation, policy: OptimizerPolicy, sizes: _Sizes, course: _Course
) -> Iterator[tuple[int, Load]]:
    """What nodes hold whatever moves."""
    graph, end = formulation.graph, course.end
    for kind in ("parameter", "buffer", "input"):
        for i, _ in graph.of_kind(kind):
            yield i, Load((0, end), sizes.made(Ref(i)))
    for i, _ in graph.of_kind("tangent"):
        yield i, Load((course.turn, course.over), sizes.made(Ref(i)))
    numbers = {node.name: i for i, node in graph.of_kind("parameter")}
    for k, (name, _) in enumerate(graph.gradients, course.optimizer):
        state, step, left = sizes.of_optimizer(numbers[name], policy)
        yield numbers[name], Load((0, end), state)
        yield numbers[name], Load((k, k + 1), step)
        if k + 1 < end and left.any():
            yield numbers[name], Load((k + 1, k + 2), left)
    if graph.micro_batches > 1:
        yield from _gradients(graph, numbers, sizes, course)
    wanted = {found.ref for found in formulation.networks}
    wanted |= {Ref(found.again, found.ref.output) for found in formulation.networks if found.again is not None}
    for i, k in course.step.items():
        for output, meta in enumerate(graph.nodes[i].outputs):
            if meta is not None and Ref(i, output) not in wanted and not is_free(graph.nodes[i]):
                first = formulation.seconds.get(i)
                if first is None:
                    yield i, Load((k, k + 1), sizes.made(Ref(i, output)))
                else:
                    yield first, Load((k, k + 1), sizes.made_again(Ref(first, output)))


def _gradients(
    graph: CapturedGraph, numbers: Mapping[str, int], sizes: _Sizes, course: _Course
) -> Iterator[tuple[int, Load]]:
    """The sums over micro-batches, and what is made of them."""
    tangents = [int(node.name.removeprefix("grad.")) for _, node in graph.of_kind("tangent")]
    trained = gradient_flow(graph, tangents).trained
    for name, ref in graph.gradients:
        made = course.step[ref.node] + 1
        if name in trained:
            yield ref.node, Load((course.first, made), sizes.made(ref))
            yield numbers[name], Load((made, course.end), sizes.made(Ref(numbers[name])))


def _networks(formulation: Formulation, sizes: _Sizes, course: _Course, setting: _Setting) -> Iterator[Network]:
    """The networks with what their copies hold, and when."""
    graph = formulation.graph
    number = {found.ref: k for k, found in enumerate(formulation.networks)}
    unknown = course.unknown | {i for i, node in graph.of_kind("operator") if is_part(node)}
    counted = {ref for ref, k in number.items() if not {ref.node, formulation.networks[k].again} & unknown}
    for found in formulation.networks:
        if found.ref not in counted:
            yield found.network
            continue
        node, base = graph.nodes[found.ref.node], None
        if graph.micro_batches > 1 and is_summed(node.name):
            yield found.network  # sums and gradients are counted as loads
            continue
        held = node.kind != "operator" or (graph.micro_batches > 1 and is_held(node.name))
        if not held and is_free(node) and node.inputs:
            looked_at = node.inputs[0]
            if looked_at in counted:
                base = _base(formulation, number[looked_at], found)
            else:
                held = True
        bytes_of = sizes.of_layouts(graph.meta(found.ref), found.layouts)
        life = _life(graph, found, course, setting, base)
        yield replace(found.network, sizes=bytes_of, lives=(life,), held=held)


def _base(formulation: Formulation, looked_at: int, view: TensorNetwork) -> Base:
    """What a view shares the memory of, and where it is made again."""
    network = formulation.networks[looked_at]
    again = None if view.again is None else _place(network, view.again)
    return Base(looked_at, 0, _place(network, view.ref.node), again)


def _place(looked_at: TensorNetwork, node: int) -> int:
    """The number of the consumer of a network that reads the first argument of a node."""
    consumers = [consumer for phase in ("forward", "backward") for consumer in _consumers(looked_at, phase)]
    return consumers.index((node, 0))


def _consumers(found: TensorNetwork, phase: str) -> list[tuple[int, int]]:
    """In the order of the network's consumers."""
    return [consumer for demand in found.demands if demand.phase == phase for consumer in demand.consumers]


def _life(graph: CapturedGraph, found: TensorNetwork, course: _Course, setting: _Setting, base: Base | None) -> Life:
    node = graph.nodes[found.ref.node]
    made = course.step.get(found.ref.node, 0)
    new = {ref for _, ref in graph.mutations}
    reads: list[tuple[int, int]] = []
    several = graph.micro_batches > 1
    for phase, over in (("forward", course.turn), ("backward", course.over)):
        for consumer, position in _consumers(found, phase):
            # behind the operator that makes it, or at the end of the phase
            at = made + 1 if node.kind == "operator" and node.phase == phase else over
            if several and position != HELD and is_summed(graph.nodes[consumer].name):
                reads.append((at, at))
                continue
            if several and position != HELD and is_held(graph.nodes[consumer].name):
                reads.append((course.step[consumer], course.over))
                continue
            if position != HELD:
                step = course.step[consumer]
                reads.append((min(step, setting.to_operators.get((node.name, phase), step)), step + 1))
                continue
            is_result = consumer >= len(graph.nodes) or graph.nodes[consumer].kind != "parameter"
            only_new = is_result and found.ref in new and found.ref not in graph.outputs
            if not is_result:
                at = max(at, setting.to_parameters.get(graph.nodes[consumer].name, at))
            reads.append((at, over if only_new else course.end))
    return Life(made, tuple(reads), base, None if found.again is None else course.step[found.again])
