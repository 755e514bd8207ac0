"""From a graph and a plan to what one rank runs: a forward and a backward graph on its shards.

The forward takes the shards of parameters, buffers and inputs and returns the results and what the backward needs; the
backward takes that and the tangents and returns the gradients. Every redistribution is one of the plan's.

In a step of several micro-batches both graphs are those of one of them: the forward takes the copies of parameters that
are held over the step, the backward gives, or adds to, the sums of gradients. What makes a copy, or takes a sum to its
parameter, is a graph of its own for each.

Operators stand in the order of the captured graph. What travels together or ahead stands where the schedule of the plan
says (:mod:`autoshard.plans.schedule`). Any other redistribution stands before the first operator that wants it, and
that of a result or a gradient behind the operator that makes it; what it leaves behind is let go of after its last use.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ..capture import CapturedGraph, Node, Ref, TensorMeta, is_random
from ..errors import VerificationError
from ..layout import Layout, format_layout
from ..ops import INTO, has, is_left_out, is_statistic, run_local, unread
from ..plans import PHASES, OperatorEntry, Phase, Redistribution, ShardingPlan
from ..plans.schedule import END, Schedule, Turn, schedule
from ..redistribution.execution import Shard, run_step
from .adapter import without_values
from .draws import Random, draw_whole, start_drawing, stream_of
from .emitter import GraphEmitter, LocalGraph, first_results, storages
from .flow import GradientFlow, gradient_flow
from .late_part import Parted, is_effect, parted
from .local_values import Results, Storage, Value
from .once_a_step import OnceAStep, once_a_step
from .owned import owned
from .rank import Rank
from .travelling import Travelling

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class LocalProgram:
    """What one rank runs.

    Both graphs take one list, which they empty. ``forward`` takes the tensors named ``arguments`` and returns
    ``results`` leaves (None for one that no operator makes), then the new values of the buffers named ``mutated``, then
    what is saved. ``backward`` (None for inference) takes what was saved, then the tangents of the results numbered
    ``tangents``, and returns the gradients of the parameters named ``trained`` (None where nothing flows).

    No two results and no two gradients share memory, and none shares it with an argument, with what was saved or with
    a tangent; gradients that were reduced together lie one behind the other in one storage, which has nothing else.
    What is saved may share it with the results numbered ``exposed_results`` and with the arguments named
    ``exposed_arguments``: the caller can reach these, and must not change them before the backward has run.

    ``once`` makes what the forward takes in the place of parameters, and gradients of what the backward returns, in a
    step of several micro-batches. There the backward takes behind the tangents the sums so far of the parameters
    ``summed``, adds to these, and returns them.

    The results numbered ``late`` are what ``parted`` makes when the caller reads them, with the operators ``deferred``.

    ``is_random`` says that some operator draws random numbers, ``random`` how they are drawn. ``schedule`` is that of
    the plan, without what a backward of fewer results leaves out.
    """

    arguments: tuple[str, ...]
    forward: LocalGraph
    results: int
    mutated: tuple[str, ...]
    backward: LocalGraph | None
    tangents: tuple[int, ...]
    trained: tuple[str, ...]
    exposed_results: frozenset[int]
    exposed_arguments: frozenset[str]
    is_random: bool
    random: Random
    once: OnceAStep
    summed: tuple[str, ...]
    schedule: Schedule
    late: tuple[int, ...]
    deferred: frozenset[str]

    @cached_property
    def parted(self) -> Parted | None:
        """``forward`` in two parts; None where no result is late."""
        return parted(self.forward, self.late, self.deferred, self.results) if self.late else None

    @cached_property
    def forward_alone(self) -> LocalGraph:
        """``forward`` where no backward can follow: it returns nothing that is saved, and keeps nothing for it. Its
        collectives and draws are the same.
        """
        return first_results(self.forward, self.results + len(self.mutated), "ForwardAlone", is_effect)


def lower(
    graph: CapturedGraph,
    plan: ShardingPlan,
    rank: Rank,
    used: Collection[int] | None = None,
    *,
    adds: bool = False,
    random: Random = "per-shard",
    known: Results | None = None,
    is_sketch: bool = False,
) -> LocalProgram:
    """Writes the local program of one rank.

    Args:
        graph: the graph the plan was made for.
        rank: its device takes the place of every device in the graph.
        used: the results that receive a gradient, by number; all that can, by default. The backward of fewer takes the
            tangents of these alone, and runs what they need alone.
        adds: whether the backward adds the gradients to sums that it takes.
        random: how random numbers are drawn (:mod:`autoshard.lowering.draws`).
        known: what operators make, from other programs of the model; gets what those of this one do.
        is_sketch: the graphs are only read, not called: each is a :class:`autoshard.lowering.sketch.Sketch` of the
            same nodes, which takes less time.

    Raises:
        VerificationError: the plan lacks a redistribution that its layouts need, or an operator on shards gives
            another shape than the plan says.
    """
    known = known or Results()
    with without_values(rank.device, known.mode):
        return _Lowering(graph, plan, rank, used, adds, random, known, is_sketch).run()


def scheduled(graph: CapturedGraph, plan: ShardingPlan) -> Schedule:
    """The schedule of a plan as it is lowered, where every result receives a gradient."""
    return _scheduled(graph, plan, gradient_flow(graph, _tangents(graph)))


def _scheduled(graph: CapturedGraph, plan: ShardingPlan, flow: GradientFlow) -> Schedule:
    """The schedule without what does not run where only some results receive a gradient."""
    backward = ((i, node) for i, node in graph.of_kind("operator") if node.phase == "backward")
    left_out = [node.name for i, node in backward if i not in flow.needed]
    unwanted = [name for name, _ in graph.gradients if name not in flow.trained]
    return schedule(plan, left_out, unwanted)


def _tangents(graph: CapturedGraph) -> tuple[int, ...]:
    """The numbers of the results that can receive a gradient."""
    return tuple(int(node.name.removeprefix("grad.")) for _, node in graph.of_kind("tangent"))


class _Lowering:
    def __init__(
        self,
        graph: CapturedGraph,
        plan: ShardingPlan,
        rank: Rank,
        used: Collection[int] | None,
        adds: bool,
        random: Random,
        known: Results,
        is_sketch: bool,
    ) -> None:
        self._graph, self._mesh, self._coordinate, self._device = graph, plan.mesh, rank.coordinate, rank.device
        self._operators = {entry.name: entry for entry in plan.operators}
        self._held = {e.name: e.layout for e in (*plan.parameters, *plan.buffers, *plan.inputs)}
        self._outputs = {entry.name: entry.layout for entry in plan.outputs}
        self._paths = {(r.tensor, r.phase, r.path[0], r.path[-1]): r for r in plan.redistributions}
        self._emitters: dict[str, GraphEmitter] = {
            phase: GraphEmitter(plan.mesh, rank.groups, known, is_sketch) for phase in PHASES
        }
        self._known, self._takers = known, _takers(plan)
        self._values: dict[tuple[Ref, str, Layout], fx.Node] = {}
        self._passed: dict[tuple[Ref, Redistribution, int], fx.Node] = {}
        self._saved: dict[tuple[Ref, Layout], fx.Node] = {}
        self._kept_in: dict[Ref, torch.dtype] = {}
        self._results: dict[str, fx.Node] = {}
        self._taken: dict[str, set[Storage]] = {}
        self._tangents = tuple(k for k in _tangents(graph) if used is None or k in used)
        self._flow = gradient_flow(graph, self._tangents)
        drawing = (i for i, node in graph.of_kind("operator") if is_random(node))
        self._random, self._drawing = random, {i: number for number, i in enumerate(drawing)}
        self._adds, self._once = adds, once_a_step(graph, plan, rank)
        held = (i for i in self._once.operators if graph.nodes[i].phase == "forward")
        self._copies = {graph.nodes[i].inputs[0].node: i for i in held}
        self._sums: dict[str, fx.Node] = {}
        self._shards: dict[tuple[int, ...], Shard] = {}
        self._late = frozenset(plan.deferred)
        refs = (Ref(i, k) for i, node in enumerate(graph.nodes) for k in range(len(node.outputs)))
        self._refs = {graph.tensor_name(ref): ref for ref in refs}
        self._schedule = _scheduled(graph, plan, self._flow)
        deferred = (bucket for bucket in self._schedule.buckets if bucket.is_deferred)
        self._travels_late: frozenset[Redistribution | None] = frozenset(
            m for bucket in deferred for m in bucket.members
        )
        self._turns: dict[str, Mapping[str, tuple[Turn, ...]]] = {
            phase: self._schedule.turns(phase) for phase in PHASES
        }
        self._travelling: dict[str, Travelling] = {
            phase: Travelling(emitter, self._schedule, self._setting_out, self._shard_of, self._arrived)
            for phase, emitter in self._emitters.items()
        }
        self._reducing = self._reduced_alone() if plan.gathers_ahead else {}  # a bucket from its first member on
        given = ((name, self._paths.get(self._gradient_move(name, ref))) for name, ref in graph.gradients)
        self._reduced = {entry: name for name, entry in given if entry in self._schedule.members}

    def run(self) -> LocalProgram:
        leaves = [(i, node) for i, node in enumerate(self._graph.nodes) if node.kind != "operator"]
        arguments = [self._add_input(i, node) for i, node in leaves if node.phase == "forward"]
        self._run_phase("forward")
        self._add_saved()
        for i, node in leaves:
            if node.phase == "backward" and Ref(i) not in self._flow.zeros:
                self._add_input(i, node)
        if self._adds:
            self._add_sums()
        self._run_phase("backward")
        trained = tuple(name for name, _ in self._graph.gradients)
        results = [self._results.get(f"output.{k}") for k in range(len(self._graph.outputs))]
        exposed = set[Storage]().union(*map(storages, self._saved.values()))
        held = zip(arguments, self._emitters["forward"].placeholders())
        return LocalProgram(
            arguments=tuple(arguments),
            forward=self._finish("forward", [*results, *self._further_results()]),
            results=len(results),
            mutated=tuple(name for name, _ in self._graph.mutations),
            backward=self._finish("backward", [self._results.get(_gradient(n)) for n in trained]) if trained else None,
            tangents=self._tangents,
            trained=trained,
            exposed_results=frozenset(
                k for k, value in enumerate(results) if value and storages(value).keys() & exposed
            ),
            exposed_arguments=frozenset(name for name, value in held if storages(value).keys() & exposed),
            is_random=bool(self._drawing),
            random=self._random,
            once=self._once,
            summed=tuple(name for name in trained if _gradient(name) in self._sums),
            schedule=self._schedule,
            late=tuple(k for k, name in enumerate(f"output.{k}" for k in range(len(results))) if name in self._late),
            deferred=self._late,
        )

    def _add_sums(self) -> None:
        """The sums of the gradients that flow, last among the inputs of the backward."""
        for name, ref in self._graph.gradients:
            if name in self._flow.trained:
                shape, tensor = self._shard(ref).local(self._layout(ref)), self._graph.tensor_name(ref)
                value = self._empty(shape, self._graph.meta(ref).dtype)
                self._sums[_gradient(name)] = self._emitters["backward"].placeholder(_identifier(tensor), value, tensor)

    def _run_phase(self, phase: Phase) -> None:
        """Every operator of a phase, and behind it what it makes for the world outside."""
        wanted = self._wanted_outside(phase)
        self._taken[phase] = set[Storage]().union(*map(storages, self._emitters[phase].placeholders()))
        makers = {ref.node for ref in wanted}
        for i, node in self._graph.of_kind("operator"):
            if node.phase != phase:
                continue
            self._take_turns(phase, node.name)
            if phase == "forward" or i in self._flow.needed:
                if i not in self._once.operators:
                    self._add_operator(i, node)
                for k in range(len(node.outputs)) if i in makers else ():
                    if not any(self._comes(*delivery, phase) for delivery in wanted.get(Ref(i, k), ())):
                        self._deliver(wanted.pop(Ref(i, k), ()), phase)
        self._take_turns(phase, END)
        self._emitters[phase].begin(END)
        for deliveries in wanted.values():  # tensors that no operator of this phase makes
            self._deliver(deliveries, phase)

    def _take_turns(self, phase: Phase, operator: str) -> None:
        """What the schedule has before an operator."""
        for turn in self._turns[phase].get(operator, ()):
            self._emitters[phase].begin(operator)
            self._travelling[phase].take(turn)

    def _setting_out(self, entry: Redistribution) -> fx.Node:
        """A tensor that travels with others, as it is made."""
        ref = self._refs[entry.tensor]
        return self._in(self._graph.meta(ref).dtype, self._values[ref, entry.phase, entry.path[0]], entry.phase)

    def _in(self, dtype: torch.dtype, value: fx.Node, phase: str) -> fx.Node:
        """A tensor in a dtype: statistics, which a device may keep in another, travel in the plan's."""
        if value.meta["val"].dtype == dtype:
            return value
        return self._emitters[phase].call(aten._to_copy.default, value, dtype=dtype)

    def _shard_of(self, entry: Redistribution) -> Shard:
        return self._shard(self._refs[entry.tensor])

    def _arrived(self, values: Mapping[Redistribution, fx.Node]) -> None:
        """Notes what arrived together."""
        for entry, value in values.items():
            ref = self._refs[entry.tensor]
            self._values[ref, entry.phase, entry.path[-1]] = self._passed[ref, entry, len(entry.path) - 1] = value
        reduced = [entry for entry in values if entry in self._reduced]
        gradients = owned(self._emitters["backward"], [values[entry] for entry in reduced])
        self._results |= {_gradient(self._reduced[entry]): value for entry, value in zip(reduced, gradients)}

    def _reduced_alone(self) -> dict[Ref, Redistribution]:
        """Tensors that nobody reads but who reduces them, in a bucket; and how they are reduced."""
        found = [entry for bucket in self._schedule.buckets if bucket.phase == "backward" for entry in bucket.members]
        if not found:
            return {}
        return {ref: entry for entry in found if self._graph.reads[ref := self._refs[entry.tensor]] == 1}

    def _gradient_move(self, name: str, ref: Ref) -> tuple[str, Phase, Layout, Layout]:
        """How the plan's redistribution of a gradient to its parameter is found."""
        return self._graph.tensor_name(ref), "backward", self._layout(ref), self._held[name]

    def _wanted_outside(self, phase: str) -> dict[Ref, list[tuple[str, Ref, Layout]]]:
        """What leaves the graph in a phase, by tensor: the name it gets in ``_results`` and its layout. Gradients that
        are reduced with others are there when they have arrived.
        """
        wanted: list[tuple[str, Ref, Layout]] = []
        if phase == "backward":
            flowing = ((name, ref) for name, ref in self._graph.gradients if name in self._flow.trained)
            reduced = set(self._reduced.values())
            wanted += [(_gradient(name), *self._given(name, ref)) for name, ref in flowing if name not in reduced]
        else:
            outputs = ((f"output.{k}", ref) for k, ref in enumerate(self._graph.outputs))
            wanted += [(name, ref, self._outputs[name]) for name, ref in outputs if ref is not None]
            wanted += [(f"new {name}", ref, self._held[name]) for name, ref in self._graph.mutations]
        grouped: dict[Ref, list[tuple[str, Ref, Layout]]] = {}
        for delivery in wanted:
            grouped.setdefault(delivery[1], []).append(delivery)
        return grouped

    def _comes(self, name: str, ref: Ref, layout: Layout, phase: Phase) -> bool:
        """Whether what leaves the graph is on its way, and delivered when all operators have run."""
        planned = self._paths.get((self._graph.tensor_name(ref), phase, self._layout(ref), layout))
        return planned in self._travels_late

    def _given(self, name: str, ref: Ref) -> tuple[Ref, Layout]:
        """What the backward gives for a parameter: its gradient, or what is added to the sum of its gradients."""
        if ref.node not in self._once.operators:
            return ref, self._held[name]
        return self._graph.nodes[ref.node].inputs[0], self._layout(ref)

    def _deliver(self, deliveries: Iterable[tuple[str, Ref, Layout]], phase: str) -> None:
        """Contiguous, as the strides of the DTensors they become say, and in memory that nothing else has: the caller
        may write into a result or a gradient.
        """
        emitter, taken = self._emitters[phase], self._taken[phase]
        for name, ref, layout in deliveries:
            value = self._moved_to(ref, phase, layout)
            if name in self._sums:
                value = emitter.call(aten.add_.Tensor, self._sums[name], value)
            elif not name.startswith("new "):
                value = emitter.call(aten.contiguous.default, value)
                if storages(value).keys() & taken:
                    value = emitter.call(aten.clone.default, value)
                if phase == "backward":
                    (value,) = owned(emitter, [value])
                taken |= storages(value).keys()
            self._results[name] = value

    def _layout(self, ref: Ref) -> Layout:
        """The layout a tensor is made in."""
        node = self._graph.nodes[ref.node]
        if node.kind == "operator":
            layout = self._operators[node.name].outputs[ref.output]
            assert layout is not None
            return layout
        if node.kind == "tangent":
            return self._outputs[f"output.{node.name.removeprefix('grad.')}"]
        return self._held[node.name]

    def _shard(self, ref: Ref) -> Shard:
        shape = self._graph.meta(ref).shape
        if shape not in self._shards:
            self._shards[shape] = Shard(shape, self._mesh, self._coordinate)
        return self._shards[shape]

    def _local_shape(self, ref: Ref) -> tuple[int, ...]:
        return self._shard(ref).local(self._layout(ref))

    def _add_saved(self) -> None:
        """What the backward reads of the forward, first among its inputs: tensors as they were made, or kept copies."""
        for _, node in self._graph.of_kind("operator"):
            if node.phase == "backward":
                inputs = self._operators[node.name].inputs
                missing = range(len(inputs)) if is_left_out(node, inputs) else unread(node, inputs)
                for k, (ref, wanted) in enumerate(zip(node.inputs, inputs)):
                    if k not in missing:
                        self._save(ref, wanted)
        for name, ref in self._graph.gradients:
            self._save(ref, self._held[name])
        written = self._written()
        for (ref, layout), value in self._saved.items():
            name = self._graph.tensor_name(ref)
            if storages(value).keys() & written:
                with self._emitters["forward"].copying(name):
                    value = self._emitters["forward"].call(aten.clone.default, value)
                self._saved[ref, layout] = value
            placeholder = self._emitters["backward"].placeholder(_identifier(name), value.meta["value"], name)
            self._values[ref, "backward", layout] = placeholder

    def _written(self) -> set[Storage]:
        """The memory of buffers that are written into as the forward ends. Who computes again with what they were, as
        a batch norm with its statistics, needs a copy.
        """
        names = {name for name, _ in self._graph.mutations} - self._graph.replaced
        refs = [Ref(i) for i, node in enumerate(self._graph.nodes) if node.name in names]
        return set[Storage]().union(*(storages(self._values[ref, "forward", self._layout(ref)]) for ref in refs))

    def _save(self, ref: Ref, wanted: Layout) -> None:
        if self._graph.nodes[ref.node].phase == "backward":
            return
        have, name = self._layout(ref), self._graph.tensor_name(ref)
        planned = self._paths.get((name, "backward", have, wanted))
        while planned is not None and planned.shared and not planned.kept:
            planned = self._taker(planned)
        kept = have
        if planned is not None and planned.kept:
            kept = planned.path[planned.shared]
            passed = self._passed.get((ref, self._taker(planned), planned.shared))
            if passed is not None:
                self._values.setdefault((ref, "forward", kept), passed)
        if (ref, "forward", kept) not in self._values:
            raise VerificationError(
                f"the plan keeps {name} in the layout {format_layout(kept, self._mesh)} for the backward, but nothing "
                "in the forward makes it"
            )
        self._saved[ref, kept] = self._values[ref, "forward", kept]

    def _taker(self, entry: Redistribution) -> Redistribution:
        """Who takes the last of the steps that a redistribution shares."""
        phase = "forward" if entry.kept else entry.phase
        taker = self._takers.get((entry.tensor, phase, entry.path[: entry.shared + 1]))
        if taker is None:
            raise VerificationError(
                f"the plan shares the first {entry.shared} steps by which {entry.tensor} gets to "
                f"{format_layout(entry.path[-1], self._mesh)} in the {entry.phase}, but nothing takes them"
            )
        return taker

    def _add_input(self, index: int, node: Node) -> str:
        ref = Ref(self._copies.get(index, index))  # a parameter comes as the copy that is held of it
        shape, dtype = self._local_shape(ref), self._graph.meta(ref).dtype
        placeholder = self._emitters[node.phase].placeholder(
            _identifier(node.name), self._empty(shape, dtype), node.name
        )
        self._values[ref, node.phase, self._layout(ref)] = placeholder
        return node.name

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Value:
        """A contiguous tensor in memory of its own."""
        return self._known.of(torch.empty, (shape,), {"dtype": dtype, "device": self._device})

    def _add_operator(self, index: int, node: Node) -> None:
        entry, emitter = self._operators[node.name], self._emitters[node.phase]
        emitter.begin(node.name)
        if (other := self._only_addend(node)) is not None:
            self._values[Ref(index), node.phase, self._layout(Ref(index))] = other
            return
        if is_left_out(node, entry.inputs):
            return
        missing = unread(node, entry.inputs)
        reads = enumerate(zip(node.inputs, entry.inputs))
        values = tuple([None if k in missing else self._read(ref, node.phase, layout) for k, (ref, layout) in reads])
        metas = tuple([self._graph.meta(ref) for ref in node.inputs])
        results = self._run(index, node, values, metas)
        for k, value in enumerate(results):
            if value is not None:
                self._values[Ref(index, k), node.phase, self._layout(Ref(index, k))] = value
                self._check_shape(Ref(index, k), value, entry)

    def _run(
        self, index: int, node: Node, values: tuple[fx.Node | None, ...], metas: tuple[TensorMeta, ...]
    ) -> list[fx.Node | None]:
        """The results of an operator on this rank's shards."""
        entry, emitter = self._operators[node.name], self._emitters[node.phase]
        if index in self._drawing:
            shard, layout = self._shard(Ref(index)), self._layout(Ref(index))
            if self._random == "as-one-process":
                taken = tuple(value for value in values if value is not None)
                return draw_whole(emitter, node, taken, metas, entry, shard, self._device)
            emitter.beside(start_drawing, stream_of(self._drawing[index], shard, layout))
        place = self._place(index, node)
        made = run_local(
            emitter, node, values, metas, entry.inputs, entry.outputs, self._mesh, self._coordinate, self._device
        )
        if place is not None:
            emitter.write_into(made, place)
        return emitter.results(made, node.outputs)

    def _place(self, index: int, node: Node) -> fx.Node | None:
        """Where an operator is to write its result, if that is reduced with others and the operator can."""
        entry = self._reducing.get(Ref(index))
        if entry is None or node.op not in INTO:
            return None
        return self._travelling[node.phase].place(entry, self._graph.meta(Ref(index)).dtype, self._device)

    def _only_addend(self, node: Node) -> fx.Node | None:
        """The other addend, where a sum of two gradients has one that is absent."""
        if len(node.inputs) != 2 or node.kwargs or not has(node, "sum"):
            return None
        entry = self._operators[node.name]
        flowing = [k for k, ref in enumerate(node.inputs) if ref not in self._flow.zeros]
        if len(flowing) != 1:
            return None
        (k,) = flowing
        if entry.inputs[k] != entry.outputs[0] or self._graph.meta(node.inputs[k]) != node.outputs[0]:
            return None
        return self._moved_to(node.inputs[k], node.phase, entry.inputs[k])

    def _check_shape(self, ref: Ref, value: fx.Node, entry: OperatorEntry) -> None:
        found, dtype, planned = value.meta["val"], self._graph.meta(ref).dtype, self._local_shape(ref)
        if found.dtype != dtype and is_statistic(self._graph.nodes[ref.node], ref.output):
            self._kept_in[ref] = dtype = found.dtype
        if (tuple(found.shape), found.dtype) != (planned, dtype):
            raise VerificationError(
                f"{entry.name} on the shards of the rank at {self._coordinate} gives {found.dtype}{list(found.shape)}; "
                f"its planned layout {format_layout(self._layout(ref), self._mesh)} needs {dtype}{list(planned)}"
            )

    def _read(self, ref: Ref, phase: str, wanted: Layout) -> fx.Node:
        """The tensor in the layout wanted, in the dtype in which this device's kernels made it."""
        value = self._moved_to(ref, phase, wanted)
        return self._in(self._kept_in[ref], value, phase) if ref in self._kept_in else value

    def _moved_to(self, ref: Ref, phase: str, wanted: Layout) -> fx.Node:
        """The tensor in the layout wanted; redistributed once per phase."""
        key = (ref, phase, wanted)
        if key in self._values:
            return self._values[key]
        if ref in self._flow.zeros:
            shape, dtype = self._shard(ref).local(wanted), self._graph.meta(ref).dtype
            return self._emitters[phase].call(aten.zeros.default, shape, dtype=dtype, device=self._device)
        have, name = self._layout(ref), self._graph.tensor_name(ref)
        self._check_runs(ref)
        planned = self._paths.get((name, phase, have, wanted))  # type: ignore[arg-type]
        if planned is None:
            raise VerificationError(
                f"the plan has no redistribution of {name} from {format_layout(have, self._mesh)} to "
                f"{format_layout(wanted, self._mesh)} in the {phase}, but its operators need one"
            )
        if planned in self._schedule.members:
            raise VerificationError(f"the plan wants {name} in the {phase} before its schedule has brought it")
        with self._emitters[phase].copying(name):
            self._values[key] = self._along(ref, planned, len(planned.path) - 1)
        return self._values[key]

    def _check_runs(self, ref: Ref) -> None:
        """Checks that a tensor is made by an operator that runs."""
        node = self._graph.nodes[ref.node]
        if node.kind == "operator" and is_left_out(node, self._operators[node.name].inputs):
            raise VerificationError(
                f"the plan leaves {node.name} out, as it takes whole rows of its tensor, and has an operator read it: "
                "both must take that tensor in the same layout"
            )

    def _along(self, ref: Ref, entry: Redistribution, steps: int) -> fx.Node:
        """The tensor after so many steps of a redistribution; each of its own runs once, whoever wants it first."""
        if steps == 0 or (entry.kept and steps == entry.shared):
            return self._in(self._graph.meta(ref).dtype, self._values[ref, entry.phase, entry.path[steps]], entry.phase)
        if steps == entry.shared:
            return self._along(ref, self._taker(entry), steps)
        if (ref, entry, steps) not in self._passed:
            before = self._along(ref, entry, steps - 1)
            layouts = entry.path[steps - 1], entry.path[steps]
            self._passed[ref, entry, steps] = run_step(self._emitters[entry.phase], before, *layouts, self._shard(ref))
        return self._passed[ref, entry, steps]

    def _further_results(self) -> list[fx.Node]:
        """What the forward returns behind the model's results: new values of buffers, and what is saved."""
        mutated = [self._results[f"new {name}"] for name, _ in self._graph.mutations]
        return [*mutated, *self._saved.values()]

    def _finish(self, phase: str, outputs: list[Any]) -> LocalGraph:
        return self._emitters[phase].finish(tuple(outputs), phase.capitalize())


def _takers(plan: ShardingPlan) -> dict[tuple[str, str, tuple[Layout, ...]], Redistribution]:
    """For every way along which a tensor is taken in a phase the redistribution that takes its last step: the first in
    the plan, where several do.
    """
    takers: dict[tuple[str, str, tuple[Layout, ...]], Redistribution] = {}
    for entry in plan.redistributions:
        for way in entry.taken:
            takers.setdefault((entry.tensor, entry.phase, way), entry)
    return takers


def _gradient(name: str) -> str:
    return f"gradient {name}"


def _identifier(name: str) -> str:
    text = re.sub(r"\W", "_", name)
    return f"_{text}" if text[:1].isdigit() or keyword.iskeyword(text) else text
