"""What one rank holds in memory at every moment of a step, found by walking the local graphs that it will run.

A tensor lives from the operator that makes it to the last one that reads it, or a view of it: the local graphs let go
of everything at that moment (:mod:`autoshard.lowering`), so what is counted is what runs. Views share the storage of
what they view; torch itself said so when the graphs were written on the meta device. While an operator runs, its
arguments and its results are alive, and so are both buffers of a collective.

Of several micro-batches the last one is followed, behind what makes the copies that are held over all of them: the sums
of gradients are there from its beginning, and what makes gradients of them runs behind its backward. What the plan
defers runs there, too, which is the latest that it may.

Held from the beginning of a step to its end: parameters, buffers, inputs (the caller has them) and the optimizer's
state (from the second step on). A gradient lives from the operator that makes it to the end of the optimizer's step; a
result of the model to the end of the step; what the backward reads of the forward until the backward has read it.
Not counted: what kernels allocate within themselves, the allocator's rounding and gaps, and torch's own libraries.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise, product
from typing import Any, cast

import torch
from torch import fx

from cost_models import OptimizerPolicy

from ..capture import CapturedGraph, micro_batched, recomputed
from ..layout import local_shape, uneven_axes
from ..lowering import NODES, LocalProgram, Rank, Results, Storage, in_use, late_nodes, lower, storages
from ..micro_batches import held_name, summed_name
from ..plans import (
    MemoryKind,
    MemoryOutcome,
    MemoryPhase,
    MemoryPoint,
    MemorySaved,
    MemoryTenant,
    ShardingPlan,
    TenantKind,
    TensorEntry,
)
from ..plans.memory_outcome import MAX_POINTS, MAX_TENANTS, TENANT_KINDS
from ..plans.natural_order import starred
from ..recomputation import first_name
from .course import Course, Lifetime, Moment, lengthened
from .short_graph import NotPeriodicError, ShortGraph
from .shortened import Shortened, shortened

OPTIMIZER_STEP = "step"


@dataclass(frozen=True)
class Tenant:
    """Memory in use: the name of the tensor that it holds, the tensor's kind (``parameter``, ...), and its bytes."""

    name: str
    kind: TenantKind
    size_bytes: int


@dataclass(frozen=True, eq=False)
class Timeline:
    """Every moment of a step in order, with the bytes in use; and who holds them at the peak, largest first.

    ``kinds`` has the bytes of each kind at each of the moments, of the kinds that hold any.
    ``saved`` has for operators of the forward that are computed again the bytes that need not be kept for it.
    """

    points: tuple[MemoryPoint, ...]
    at_peak: tuple[Tenant, ...]
    static: Mapping[TenantKind, int]
    saved: Mapping[str, int]
    kinds: Mapping[TenantKind, tuple[int, ...]]

    @property
    def peak(self) -> MemoryPoint:
        """The moment at which most bytes are in use; the first of several."""
        return max(self.points, key=lambda point: point.size_bytes)


def timeline_of(
    graph: CapturedGraph,
    plan: ShardingPlan,
    policy: OptimizerPolicy,
    known: Results | None = None,
    shorts: Sequence[ShortGraph] = (),
) -> Timeline:
    """What the fullest rank holds in memory over one training step.

    Shards of rank 0 are the largest, but where a tensor is cut unevenly the others pad theirs before they send them, so
    the last ranks along the axes that do so are looked at too.

    Args:
        known: what operators make, from other plans of the model (:func:`autoshard.lowering.lower`).
        shorts: how the graph was shortened before the plan was made.
    """
    (found,) = timelines_of(graph, plan, [policy], known, shorts)
    return found


def timelines_of(
    graph: CapturedGraph,
    plan: ShardingPlan,
    policies: Sequence[OptimizerPolicy],
    known: Results | None = None,
    shorts: Sequence[ShortGraph] = (),
) -> list[Timeline]:
    """The same with each of several optimizers."""
    known = known or Results()
    graph = recomputed(micro_batched(graph, plan.micro_batches), plan.recomputed)
    try:
        courses = _courses(graph, plan, known, shortened(graph, plan, shorts))
    except NotPeriodicError:
        courses = _courses(graph, plan, known, [])
    found = [[_timeline(course, graph, plan, policy, corner) for corner, course in courses] for policy in policies]
    return [max(every, key=lambda found: found.peak.size_bytes) for every in found]


def _courses(
    graph: CapturedGraph, plan: ShardingPlan, known: Results, steps: Sequence[Shortened]
) -> list[tuple[tuple[int, ...], Course]]:
    """The courses of the ranks that may be the fullest, with their coordinates, by way of the last of shortened steps.

    Raises:
        NotPeriodicError: the layers that these lack do not do the same as the others.
    """
    short = (steps[-1].graph, steps[-1].plan) if steps else (graph, plan)
    found = []
    for corner in _corners(*short):
        course = _course(*short, corner, known)
        for step in reversed(steps):
            course = lengthened(course, step)
        found.append((corner, course))
    return found


def timeline(
    graph: CapturedGraph,
    plan: ShardingPlan,
    policy: OptimizerPolicy,
    coordinate: tuple[int, ...],
    known: Results | None = None,
) -> Timeline:
    """What the rank at a coordinate of the mesh holds in memory over one training step, each layer followed by itself.
    Needs no process group.
    """
    graph = recomputed(micro_batched(graph, plan.micro_batches), plan.recomputed)
    return _timeline(_course(graph, plan, coordinate, known), graph, plan, policy, coordinate)


def _course(graph: CapturedGraph, plan: ShardingPlan, coordinate: tuple[int, ...], known: Results | None) -> Course:
    """What the rank at a coordinate does."""
    rank = Rank(coordinate, torch.device("cpu"), {link: link for link in plan.links})
    program = lower(graph, plan, rank, adds=plan.micro_batches > 1, known=known, is_sketch=True)
    return _Simulation(plan, program, coordinate).course()


def outcome(
    found: Timeline,
    optimizer: str,
    budget_bytes: int | None = None,
    soft_ms_per_gib: float | None = None,
    allocator_margin: float = 0.0,
) -> MemoryOutcome:
    """A timeline as a plan file has it: the largest tensors at the peak, and at most MAX_POINTS moments of the step."""
    tenants, moments = _merged(found.at_peak), _thinned(found.points)
    named, others = tenants[:MAX_TENANTS], tenants[MAX_TENANTS:]
    return MemoryOutcome(
        optimizer=optimizer,
        budget_bytes=budget_bytes,
        soft_ms_per_gib=soft_ms_per_gib,
        parameter_bytes=found.static["parameter"],
        gradient_bytes=found.static["gradient"],
        optimizer_bytes=found.static["optimizer"],
        buffer_bytes=found.static["buffer"],
        input_bytes=found.static["input"],
        peak=found.peak,
        tenants=tuple(named),
        other_bytes=sum(tenant.size_bytes for tenant in others),
        timeline=tuple(found.points[moment] for moment in moments),
        allocator_margin=allocator_margin,
        saved=tuple(_together(found.saved)),
        kinds=tuple(_kinds(found, moments)),
    )


def _kinds(found: Timeline, moments: list[int]) -> Iterator[MemoryKind]:
    """What these moments are made of."""
    for kind in TENANT_KINDS:
        sizes = tuple(found.kinds[kind][moment] for moment in moments) if kind in found.kinds else ()
        if any(sizes):
            yield MemoryKind(kind, sizes)


def _together(saved: Mapping[str, int]) -> Iterator[MemorySaved]:
    """Operators of identical layers as one each, those first that save most."""
    sizes: dict[str, int] = defaultdict(int)
    for name, size in saved.items():
        sizes[starred(name)] += size
    for name, size in sorted(sizes.items(), key=lambda each: (-each[1], each[0])):
        yield MemorySaved(name, size)


def _corners(graph: CapturedGraph, plan: ShardingPlan) -> Iterable[tuple[int, ...]]:
    """The first ranks, and the last ones along axes on which ranks hold different shapes."""
    uneven = _uneven_axes(graph, plan)
    ends = (sorted({0, size - 1 if axis in uneven else 0}) for axis, size in enumerate(plan.mesh.shape))
    return product(*ends)


def _uneven_axes(graph: CapturedGraph, plan: ShardingPlan) -> frozenset[int]:
    """The axes on which the ranks hold different shapes of some tensor."""
    layouts = {entry.name: entry.outputs for entry in plan.operators}
    layouts |= {entry.name: (entry.layout,) for entry in (*plan.parameters, *plan.buffers, *plan.inputs)}
    made = {
        (meta.shape, layout)
        for node in graph.nodes
        for meta, layout in zip(node.outputs, layouts.get(node.name, ()))
        if meta is not None and layout is not None
    }
    return frozenset().union(*(uneven_axes(shape, layout, plan.mesh) for shape, layout in made))


def _merged(tenants: Iterable[Tenant]) -> list[MemoryTenant]:
    """Tensors of identical layers as one tenant each, largest first."""
    sizes: dict[tuple[str, TenantKind], list[int]] = defaultdict(list)
    for tenant in tenants:
        sizes[starred(tenant.name), tenant.kind].append(tenant.size_bytes)
    merged = [MemoryTenant(name, kind, len(each), sum(each)) for (name, kind), each in sizes.items()]
    return sorted(merged, key=lambda tenant: (-tenant.size_bytes, tenant.name, tenant.kind))


def _thinned(points: tuple[MemoryPoint, ...]) -> list[int]:
    """The places of at most MAX_POINTS: of the fullest moment of each of as many equal parts."""
    parts = min(len(points), MAX_POINTS)
    bounds = [len(points) * part // parts for part in range(parts)] + [len(points)]
    return [max(range(*part), key=lambda place: points[place].size_bytes) for part in pairwise(bounds)]


class _Simulation:
    """Walks the forward and backward graph once and notes when each storage is made and last needed.

    Two tensors share a storage where torch made one a view of the other when the graphs were written.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        program: LocalProgram,
        coordinate: tuple[int, ...],
    ) -> None:
        self._plan, self._program, self._coordinate = plan, program, coordinate
        self._taken = dict(zip(program.arguments, _placeholders(program.forward.graph), strict=True))
        self._moments: list[Moment] = []
        self._storages: dict[Storage, Lifetime] = {}
        self._again: dict[Storage, str] = {}
        self._late: Collection[fx.Node] = ()
        self._saved: dict[str, int] = defaultdict(int)

    def course(self) -> Course:
        """Walks through the step once."""
        program = self._program
        self._add_held()
        held = set(self._storages)
        copies = self._add_copies()
        self._add_sums()
        self._late = late_nodes(program.forward.graph, program.late, program.deferred) if program.late else {}
        results = self._walk("forward", program.forward.graph)
        outputs = _keys(results[: program.results])
        gradients = self._walk("backward", program.backward.graph) if program.backward is not None else []
        for node in self._late:
            self._run("backward", node)
        for copy in copies:
            copy.last = len(self._moments) - 1
        gradients = self._reduced(gradients)
        for name, value in zip(program.trained, gradients):
            self._become(_keys([value]), name, "gradient")
        self._become(outputs - held, "output", "output")
        if program.trained:
            self._moments.append(("optimizer", OPTIMIZER_STEP))
        for key in (*held, *outputs, *_keys(gradients)):
            self._storages[key].last = len(self._moments) - 1
        # what one graph gives and another takes is one storage under two keys
        every = {id(lifetime): lifetime for lifetime in self._storages.values()}
        return Course(self._moments, [each for each in every.values() if each.size_bytes], self._saved)

    def _add_held(self) -> None:
        """Parameters, buffers and inputs; those that the graph reads, by their storages."""
        gathers, plan = self._program.once.gathers, self._plan
        values = self._taken | {name: _placeholders(gather.graph)[0] for name, gather in gathers.items()}
        for kind, entry, size in _held(plan, self._coordinate):
            (key,) = _keys([values[entry.name]]) if entry.name in values else (Storage(size),)
            self._storages[key] = Lifetime(entry.name, kind, size, 0, 0, is_held=True)

    def _add_copies(self) -> list[Lifetime]:
        """Makes the copies of parameters that are held over the step, where they lie otherwise."""
        found: list[Lifetime] = []
        for name, gather in self._program.once.gathers.items():
            (copy,) = _keys(self._walk("forward", gather.graph))
            self._become({copy}, held_name(name), "parameter")
            found.append(self._storages[copy])
            (taken,) = _keys([self._taken[name]])
            self._storages[taken] = found[-1]
        return found

    def _add_sums(self) -> None:
        """The sums of gradients, which are there from the micro-batches before."""
        backward, first = self._program.backward, len(self._moments)
        if backward is None or not self._program.summed:
            return
        placeholders = _placeholders(backward.graph)[-len(self._program.summed) :]
        for name, node in zip(self._program.summed, placeholders, strict=True):
            for key, size in storages(node).items():
                self._storages[key] = Lifetime(summed_name(name), "gradient", size, first, first)

    def _reduced(self, gradients: list[Any]) -> list[Any]:
        """Makes gradients of the sums, one after the other; those that are there already stay as they are."""
        made: list[Any] = []
        for key in _keys(gradients):  # all sums are there until they are taken
            self._storages[key].last = len(self._moments) - 1
        for name, value in zip(self._program.trained, gradients):
            reduction = self._program.once.reductions.get(name)
            if reduction is None or value is None:
                made.append(value)
                continue
            (total,), (shard,) = _keys([value]), _keys(_placeholders(reduction.graph)[:1])
            self._storages[shard] = self._storages[total]
            made += self._walk("backward", reduction.graph)
        return made

    def _walk(self, phase: MemoryPhase, graph: fx.Graph) -> list[Any]:
        """Adds the moments of a graph; returns what it returns."""
        tangents: list[Storage] = []
        returned: list[Any] = []
        first = len(self._moments)
        for node in graph.nodes:
            if node.op == "placeholder":
                for key, size in storages(node).items():
                    if key not in self._storages:  # tangents
                        name = node.meta["label"].tensor
                        self._storages[key] = Lifetime(name, "temporary", size, first, first)
                        tangents.append(key)
            elif node.op == "output":
                returned = list(node.args[0])
            elif node not in self._late:
                self._run(phase, node)
        last = max(first, len(self._moments) - 1)
        for key in _keys(returned):
            if key not in self._storages:  # a result that is late has its place from here on
                self._storages[key] = Lifetime("", "output", key.size_bytes, last, last)
            self._storages[key].last = max(self._storages[key].last, last)
        for key in tangents:  # autograd holds them to the end of the backward
            self._storages[key].last = last
        return returned

    def _run(self, phase: MemoryPhase, node: fx.Node) -> None:
        label, moment = node.meta["label"], len(self._moments)
        self._moments.append((phase, label.operator))
        again = first_name(label.operator)
        for key in (key for read in in_use(node) for key in read.meta["value"].memory()):
            if key in self._storages:
                self._storages[key].last = moment
            if again is None and key in self._again:
                self._saved[self._again.pop(key)] += self._storages[key].size_bytes
        for key in node.meta["value"].memory():
            if key in self._storages:
                continue
            if again is not None and not label.is_copy:
                self._again[key] = again
            kind: TenantKind = "temporary" if label.is_copy else "activation"
            bucket = None if label.bucket is None else self._program.schedule.buckets[label.bucket].key
            self._storages[key] = Lifetime(label.tensor, kind, key.size_bytes, moment, moment, bucket=bucket)

    def _become(self, keys: set[Storage], name: str, kind: TenantKind) -> None:
        for key in keys:
            self._storages[key].name, self._storages[key].kind = name, kind


def _held(plan: ShardingPlan, coordinate: tuple[int, ...]) -> Iterator[tuple[TenantKind, TensorEntry, int]]:
    """What a rank holds all the time and gets from outside, each with its kind and bytes."""
    kinds: tuple[tuple[TenantKind, tuple[TensorEntry, ...]], ...] = (
        ("parameter", plan.parameters),
        ("buffer", plan.buffers),
        ("input", plan.inputs),
    )
    for kind, entries in kinds:
        for entry in entries:
            shape = local_shape(entry.shape, entry.layout, plan.mesh, coordinate)
            yield kind, entry, math.prod(shape) * getattr(torch, entry.dtype).itemsize


def _optimizer(
    graph: CapturedGraph, plan: ShardingPlan, policy: OptimizerPolicy, coordinate: tuple[int, ...], end: int
) -> tuple[int, list[Lifetime]]:
    """The bytes of all gradients; and the state of every trained parameter, from the beginning to the end, with what
    the step takes at most, one parameter at a time.
    """
    entries = {entry.name: entry for entry in plan.parameters}
    left_before = "", 0
    fullest: list[tuple[str, int]] = []
    found, gradients = [], 0
    for name, _ in graph.gradients:  # the order of model.parameters()
        entry = entries[name]
        shape = local_shape(entry.shape, entry.layout, plan.mesh, coordinate)
        elements, itemsize = math.prod(shape), getattr(torch, entry.dtype).itemsize
        found.append(Lifetime(name, "optimizer", policy.state_bytes(elements, itemsize), 0, end))
        gradients += elements * itemsize
        held = [(name, policy.step_bytes(elements, itemsize)), left_before]
        fullest = max(fullest, held, key=lambda each: sum(size for _, size in each))
        left_before = name, policy.left_bytes(elements, itemsize)
    steps = (Lifetime(name, "temporary", size, end, end) for name, size in fullest)
    return gradients, [each for each in (*found, *steps) if each.size_bytes]


def _timeline(
    course: Course, graph: CapturedGraph, plan: ShardingPlan, policy: OptimizerPolicy, coordinate: tuple[int, ...]
) -> Timeline:
    """The bytes in use at every moment of a course."""
    moments, count = course.moments, len(course.moments)
    gradients, others = _optimizer(graph, plan, policy, coordinate, count - 1)
    static: dict[TenantKind, int] = dict.fromkeys(("parameter", "gradient", "optimizer", "buffer", "input"), 0)
    for kind, _, size in _held(plan, coordinate):
        static[kind] += size
    static["gradient"] = gradients
    static["optimizer"] = sum(each.size_bytes for each in others if each.kind == "optimizer")
    lifetimes = [*course.lifetimes, *others]
    changes: dict[TenantKind, list[int]] = defaultdict(lambda: [0] * (count + 1))
    for each in lifetimes:
        of_kind = changes[_kind(each, moments)]
        of_kind[each.first] += each.size_bytes
        of_kind[each.last + 1] -= each.size_bytes
    courses = {kind: list(accumulate(each))[:-1] for kind, each in changes.items()}
    used = [sum(sizes) for sizes in zip(*courses.values())] or [0] * count
    fullest = max(range(count), key=used.__getitem__)
    alive = (each for each in lifetimes if each.first <= fullest <= each.last)
    tenants = (Tenant(each.name, _kind(each, moments), each.size_bytes) for each in alive)
    # an operator with copies around it has several moments in a row, of which the fullest counts
    runs = groupby(range(count), key=moments.__getitem__)
    places = [max(run, key=used.__getitem__) for _, run in runs]
    points = tuple(MemoryPoint(*moments[place], used[place]) for place in places)
    kinds = {kind: tuple(of_kind[place] for place in places) for kind, of_kind in courses.items()}
    at_peak = tuple(sorted(tenants, key=lambda each: (-each.size_bytes, each.name, each.kind)))
    return Timeline(points, at_peak, static, course.saved, kinds)


def _kind(lifetime: Lifetime, moments: Sequence[Moment]) -> TenantKind:
    """What memory is of: a copy that the forward made and the backward reads is kept."""
    phases = moments[lifetime.first][0], moments[lifetime.last][0]
    is_kept = lifetime.kind == "temporary" and phases == ("forward", "backward")
    return "kept copy" if is_kept else lifetime.kind


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _keys(values: Iterable[Any]) -> set[Storage]:
    return {key for value in values if isinstance(value, NODES) for key in storages(cast(fx.Node, value))}
