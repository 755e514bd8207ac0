"""From a solution to a plan: the chosen layouts by name, and every redistribution with its steps and seconds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from cost_models import Profile, axis_networks
from solver import Routes, Solution

from ..capture import CapturedGraph, Node, Ref, TensorMeta
from ..constraints.names import output_name
from ..layout import Layout, replicated
from ..micro_batches import is_held, is_summed, operator_runs, redistribution_runs
from ..plans import (
    Collective,
    Execution,
    IdenticalLayers,
    OperatorEntry,
    Redistribution,
    ShardingPlan,
    SolverOutcome,
    TensorEntry,
)
from ..strategies import Strategy
from .deferral import deferred
from .formulation import Formulation
from .pricing import is_looked_at_again, repeated
from .tensor_networks import HELD, Demand, TensorNetwork, layout_of, ways
from .whole_plan import lengthened


def interpret(formulation: Formulation, solution: Solution, profile: Profile, model: str, call: str) -> ShardingPlan:
    """Writes a solution as a plan, of the whole step whatever layers the program lacks.

    Args:
        solution: one that has choices. Its cost is worked out without what a memory budget adds. Where the solver ended
            without a bound, that is zero: no price is negative.
        profile: the one the formulation was priced with.
        model: the name of the model, for people.
        call: how the model is called, as :func:`autoshard.capture.calls.describe_call` writes it.
    """
    assert solution.choices is not None
    answer = formulation.routed(solution.choices, solution.routes)
    assert answer is not None, "a solution breaks a constraint"
    assignment, cost = answer
    bound = min(cost, solution.bound or 0)
    layers: IdenticalLayers = "alike" if formulation.problem.ties else "free"
    reader = _Reader(formulation, solution.choices, assignment.routes)
    graph, whole = formulation.graph, formulation.whole
    plan = ShardingPlan(
        model=model,
        fingerprint=whole.fingerprint,
        call=call,
        micro_batches=graph.micro_batches,
        batch_dim=graph.batch_dim,
        precision=graph.precision,
        bucket_bytes=formulation.prices.bucket_bytes,
        mesh=formulation.mesh,
        network=axis_networks(profile, formulation.prices.topology),
        hardware=profile.name,
        hardware_fingerprint=profile.fingerprint,
        contention=profile.contention,
        objective=formulation.objective,
        pins=tuple(constraint.text for constraint in formulation.constraints),
        solver=SolverOutcome.of(cost, bound, layers, formulation.groups),
        compute_s=reader.compute_s(),
        communication_s=reader.communication_s(),
        optimizer_s=reader.optimizer_s(),
        at_peak_s=formulation.prices.at_peak_s(),
        parameters=(*reader.entries("parameter"), *reader.unused()),
        buffers=tuple(reader.entries("buffer")),
        inputs=tuple(reader.entries("input")),
        outputs=tuple(reader.outputs()),
        operators=tuple(reader.operators()),
        redistributions=tuple(entry for entry, _, _ in reader.moved),
        execution=tuple(reader.execution()),
        gathers_ahead=formulation.prices.gathers_ahead,
    )
    return lengthened(replace(plan, deferred=deferred(graph, plan)), formulation.shorts)


class _Reader:
    """Reads a solution: the strategy that was chosen for every solver node, and what follows from it for the plan."""

    def __init__(self, formulation: Formulation, choices: tuple[int, ...], routes: tuple[Routes, ...]) -> None:
        self._formulation = formulation
        self._routes = routes
        self._graph = formulation.graph
        self._chosen: list[Strategy] = [
            strategies[choice] for strategies, choice in zip(formulation.strategies, choices)
        ]
        self._computations = list(computations(formulation, choices))
        self._stepped_s: dict[object, float] = {}
        self.moved = list(self._redistributions())

    def entries(self, kind: str) -> Iterator[TensorEntry]:
        for i, node in self._graph.of_kind(kind):  # type: ignore[arg-type]
            meta, layout = node.outputs[0], self._chosen[i].outputs[0]
            assert meta is not None and layout is not None
            yield _entry(node.name, meta, layout)

    def unused(self) -> Iterator[TensorEntry]:
        """Parameters that the step never reads are whole on every rank."""
        for name, meta in self._graph.unused:
            yield _entry(name, meta, replicated(self._formulation.mesh))

    def outputs(self) -> Iterator[TensorEntry]:
        number = {node.name: i for i, node in self._graph.of_kind("tangent")}
        first = len(self._graph.nodes)
        number |= {name: first + k for k, (name, _) in enumerate(self._formulation.results)}
        for k, ref in enumerate(self._graph.outputs):
            if ref is not None:
                name = output_name(k)
                layout = self._chosen[number[f"grad.{k}" if f"grad.{k}" in number else name]].outputs[0]
                assert layout is not None
                yield _entry(name, self._graph.meta(ref), layout)

    def operators(self) -> Iterator[OperatorEntry]:
        for i, node in self._graph.of_kind("operator"):
            yield OperatorEntry(node.name, node.phase, self._chosen[i].inputs, self._chosen[i].outputs)

    def compute_s(self) -> float:
        runs, times = self._graph.micro_batches, self._times_of(i for i, _ in self._graph.of_kind("operator"))
        each = (operator_runs(node.name, runs) * seconds for node, seconds in self._computations)
        return math.fsum(repeated(each, times))

    def communication_s(self) -> float:
        runs = (_runs(entry, self._graph) * seconds for entry, seconds, _ in self.moved)
        return math.fsum(repeated(runs, self._times_of(ref.node for _, _, ref in self.moved)))

    def _times_of(self, nodes: Iterable[int]) -> list[int]:
        """How many nodes of the whole step each of these stands for, where some stand for several."""
        times = self._formulation.times
        return [times[i] for i in nodes] if times else []

    def optimizer_s(self) -> float:
        """Seconds of the optimizer's step over all trained parameters."""
        number = {node.name: i for i, node in self._graph.of_kind("parameter")}
        trained = [number[name] for name, _ in self._graph.gradients]
        return math.fsum(repeated(map(self._optimizer_s, trained), self._times_of(trained)))

    def _optimizer_s(self, i: int) -> float:
        key = meta, layout = self._graph.meta(Ref(i)), layout_of(self._chosen[i], None)
        if key not in self._stepped_s:
            self._stepped_s[key] = float(self._formulation.prices.optimizer_s(meta, (layout,))[0])
        return self._stepped_s[key]

    def execution(self) -> Iterator[Execution]:
        """The operators in the order they run in: that of the graph, the forward first.

        The graph may have operators of the backward among the others: copies of what the forward is about to change.
        """
        for node, seconds in sorted(self._computations, key=lambda found: found[0].phase != "forward"):
            yield Execution(node.name, node.phase, round(seconds * 1e9))

    def _redistributions(self) -> Iterator[tuple[Redistribution, float, Ref]]:
        """Each with its seconds and its tensor, those of the forward first; a layout wanted by several in one phase
        comes once.
        """
        moving = [(found, routes) for found, routes in zip(self._formulation.networks, self._routes) if any(routes)]
        for phase in ("forward", "backward"):
            for found, routes in moving:
                for demand in found.demands:
                    if demand.phase == phase:
                        yield from self._moved(found, demand, routes)

    def _moved(
        self, found: TensorNetwork, demand: Demand, routes: Routes
    ) -> Iterator[tuple[Redistribution, float, Ref]]:
        """The redistributions of one tensor in one phase, in the order in which they are first wanted."""
        made = layout_of(self._chosen[found.ref.node], None, found.ref.output)
        wanted: dict[Layout, list[str]] = defaultdict(list)
        for node, layout in self._wanted(demand):
            if layout != made:
                wanted[layout].append(self._formulation.consumer_name(node))
        if not wanted:
            return
        prices, meta, mesh = self._formulation.prices, self._graph.meta(found.ref), self._formulation.mesh
        for way in ways(found, demand.phase, made, tuple(wanted), routes):
            steps = prices.along_s(meta, way.path[way.shared :], prices.together(found.ref))
            collectives = tuple(
                Collective(step.kind, mesh.named(step.axes), size, seconds)  # type: ignore[arg-type]
                for step, size, seconds in steps
                if step.communicates
            )
            consumers = tuple(dict.fromkeys(wanted[way.path[-1]]))
            yield (
                Redistribution(
                    self._graph.tensor_name(found.ref),
                    demand.phase,  # type: ignore[arg-type]
                    way.path,
                    collectives,
                    way.kept,
                    consumers,
                    way.shared,
                ),
                math.fsum(seconds for _, _, seconds in steps),
                found.ref,
            )

    def _wanted(self, demand: Demand) -> Iterator[tuple[int, Layout]]:
        """Who wants a tensor in which layout: those who hold it first, as it is taken to them once it is made."""
        for node, position in sorted(demand.consumers, key=lambda consumer: consumer[1] != HELD):
            yield node, layout_of(self._chosen[node], position)


def computations(formulation: Formulation, choices: Sequence[int]) -> Iterator[tuple[Node, float]]:
    """The operators with their seconds under their choices: operators whose strategies are one tuple are alike, and are
    priced once. Sums of gradients and held copies share theirs with whatever has their shape.
    """
    known: dict[object, float] = {}
    for i, node in formulation.graph.of_kind("operator"):
        strategies, choice = formulation.strategies[i], choices[i]
        is_tensor = is_summed(node.name) or is_held(node.name)
        kind = (is_summed(node.name), node.outputs) if is_tensor else is_looked_at_again(node)
        key = id(strategies), choice, kind
        if key not in known:
            known[key] = float(formulation.prices.compute_s(node, (strategies[choice],))[0])
        yield node, known[key]


def _runs(entry: Redistribution, graph: CapturedGraph) -> int:
    """How often a redistribution runs in a step."""
    return redistribution_runs(entry.tensor, entry.consumers, graph.micro_batches)


def _entry(name: str, meta: TensorMeta, layout: Layout) -> TensorEntry:
    return TensorEntry(name, meta.shape, str(meta.dtype).removeprefix("torch."), layout)
