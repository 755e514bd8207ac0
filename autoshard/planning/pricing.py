"""Predicted seconds of each strategy of an operator, and of moving a tensor from one layout to another.

Compute is priced on the largest shard: flops and bytes touched, under the profile's roofline. A view moves nothing and
costs what it takes the host to issue it, where the profile knows that. Redistributions are priced step by step, along
the cheapest path; the optimizer's step over a parameter by the bytes of the largest shard
(:mod:`cost_models.optimizers`).

What travels together is not priced by itself: of parameters that are gathered ahead each has its part, by bytes, of the
seconds of all its layer in one collective, and gradients theirs of all gradients in one, but of no more than a bucket
has. So prices are no higher than what the schedule of the plan comes to, where a bucket is less full: a bound holds.

Steps in which a tensor travels with others may hide behind computation, and so may all steps of one that some operator
of its phase reads behind others that take time. With a ``contention`` below 1 they have that
share of their price, as if all of them hid: no schedule of the plan takes less. (What an activation's way to a reader
right behind its maker costs is whole: :meth:`Prices.unhidden_s`.) A plan's own times are whole.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from cost_models import OptimizerPolicy, Profile, Topology, optimizer_policy

from ..capture import CapturedGraph, Node, Ref, TensorMeta
from ..layout import P_SUM, Layout, Placement, largest_local_shape
from ..mesh import Mesh
from ..micro_batches import is_summed
from ..ops import INTO, has, is_free, is_left_out, known, unread
from ..plans.schedule import GATHERS, REDUCTIONS, layer_of
from ..precision import cast_name, reduced_name
from ..recomputation import first_name
from ..redistribution import Banned, Step, size_bytes, steps_along
from ..redistribution.paths import (
    FloatArray,
    IntArray,
    Paths,
    Steps,
    cheapest_paths,
    copied_bytes,
    layouts_of,
    single_steps,
)
from ..strategies import Strategy
from .deferral import read_late
from .early_readers import at_once, late_readers

Shape = tuple[int, ...]
_T = TypeVar("_T")
NO_OPTIMIZER = optimizer_policy("none")


LOOK_AGAIN_S = 1e-8
"""At least, for a view that is made again (a host takes more). A weight that is gathered anew in the backward may be
gathered before its view is made again, or behind the view that is there: of two equal ways one must be dearer. Without
this the search of Llama-3-8B on 2x4x8 under 20 GiB took 549 CPU seconds, with 1 ns 61 and with 10 ns 49.
"""
COLLECTIVE_OPERATORS = 3
"""Of the host, for a step that communicates: what is sent is made contiguous, it is sent, and waited for. In a bucket
two views take the place of the last two.
"""


def is_looked_at_again(node: Node) -> bool:
    """Whether an operator is a view that is made again."""
    return first_name(node.name) is not None and is_free(node)


class Together(NamedTuple):
    """In which kinds of collectives a tensor travels with others, and the bytes of all of them together at most;
    whether it may travel ahead alone in all other kinds, whether it is written where it travels as it is made, and
    whether ranks wait for each other as it arrives.
    """

    kinds: frozenset[str]
    size_bytes: int
    is_early: bool = False
    is_written: bool = False
    meets: bool = True


ALONE = Together(frozenset(), 0)
EARLY = ALONE._replace(is_early=True)


class Prices:
    """The prices of one graph on one mesh of one machine, with one optimizer; each is worked out once and kept.

    ``times`` are how many nodes of a ``whole`` graph each node of the graph stands for; none where that is itself.
    """

    def __init__(
        self,
        graph: CapturedGraph,
        mesh: Mesh,
        profile: Profile,
        policy: OptimizerPolicy = NO_OPTIMIZER,
        bucket_bytes: int = 0,
        contention: float = 1.0,
        gathers_ahead: bool = True,
        times: Sequence[int] = (),
        whole: CapturedGraph | None = None,
    ) -> None:
        self._graph = graph
        self.times, self._whole = tuple(times), whole
        self.gathers_ahead = gathers_ahead
        self.bucket_bytes = bucket_bytes
        self._contention = contention
        self._mesh = mesh
        self._profile = profile
        self._policy = policy
        self.topology: Topology = profile.topology(mesh.axes, mesh.shape, mesh.order or None)
        self._local = lru_cache(maxsize=None)(lambda shape, layout: largest_local_shape(shape, layout, mesh))
        self._steps: dict[object, Steps] = {}
        self._paths: dict[int, Paths] = {}
        self._matrices: dict[object, np.ndarray] = {}
        self._along: dict[object, tuple[tuple[Step, int, float], ...]] = {}

    def on(self, graph: CapturedGraph) -> Prices:
        """The prices of another graph; what is known stays known."""
        other = copy(self)
        other._graph, other.times, other._whole = graph, (), None
        other.__dict__.pop("_together", None)
        return other

    def compute_s(self, node: Node, strategies: tuple[Strategy, ...]) -> np.ndarray:
        """Seconds of an operator on one rank under each of its strategies, shape (S,)."""
        if self._graph.micro_batches > 1 and is_summed(node.name):
            layouts = (strategy.inputs[0] for strategy in strategies)
            return np.array([self._addition_s(self._graph.meta(node.inputs[0]), layout) for layout in layouts])
        if node.kind != "operator":
            return np.zeros(len(strategies))
        if is_free(node):
            again_s = LOOK_AGAIN_S if is_looked_at_again(node) else 0.0
            return np.full(len(strategies), max(self._profile.compute.issue_s, again_s))
        metas = tuple(self._graph.meta(ref) for ref in node.inputs)
        return np.array([self._operator_s(node, metas, strategy) for strategy in strategies])

    def evenly_s(self, node: Node, whole: Strategy) -> float:
        """Seconds of an operator with its flops and bytes shared out evenly among all ranks; no layout undercuts it.

        Args:
            whole: its strategy in which every rank runs all of it.
        """
        if is_free(node):
            return self._profile.compute.issue_s
        return self._operator_s(node, tuple(map(self._graph.meta, node.inputs)), whole, self._mesh.size)

    def optimizer_s(self, meta: TensorMeta, layouts: Iterable[Layout]) -> np.ndarray:
        """Seconds of the optimizer's step over a trained parameter on one rank in each of its layouts."""
        dtype, itemsize = str(meta.dtype), meta.dtype.itemsize
        held = (math.prod(self._local(meta.shape, layout)) for layout in layouts)
        return np.array([self._policy.step_s(self._profile.compute, dtype, count, itemsize) for count in held])

    def at_peak_s(self) -> float:
        """Seconds of the step's products, convolutions and attention, shared out evenly, if every rank ran at the peak
        of the dtype; what is computed again does not count. Over the step's seconds it is the MFU.

        Source: A. Chowdhery et al., PaLM, https://arxiv.org/abs/2204.02311, appendix B; of causal attention, which they
        count in full, what is computed counts.
        """
        each = map(self._at_peak_s, self._graph.nodes)
        return math.fsum(repeated(each, self.times)) * self._graph.micro_batches / self._mesh.size

    def _at_peak_s(self, node: Node) -> float:
        if node.kind != "operator" or first_name(node.name) is not None or known(node.op).flops is None:
            return 0.0
        inputs = [self._graph.meta(ref).shape for ref in node.inputs]
        outputs = [meta for meta in node.outputs if meta]
        flops, _ = _flops(node, inputs, [meta.shape for meta in outputs])
        return flops / self._profile.compute.peak(str(outputs[0].dtype))

    def matrix_s(
        self,
        meta: TensorMeta,
        before: tuple[Layout, ...],
        after: tuple[Layout, ...],
        banned: Banned = frozenset(),
    ) -> np.ndarray:
        """Seconds from each layout to each other, shape (len(before), len(after)), infinite where no way leads.

        Ways around the steps that are ``banned`` are taken.
        """
        key = (meta, before, after, banned)
        if key not in self._matrices:
            paths = self._paths_of(self.steps(meta, further_placements(before + after), banned))
            index = {layout: i for i, layout in enumerate(paths.layouts)}
            rows, cols = [index[a] for a in before], [index[b] for b in after]
            self._matrices[key] = paths.seconds[np.ix_(rows, cols)]
        return self._matrices[key]

    def path(self, meta: TensorMeta, before: Layout, after: Layout, banned: Banned = frozenset()) -> tuple[Layout, ...]:
        """The cheapest path between two layouts."""
        return self._paths_of(self.steps(meta, further_placements((before, after)), banned)).path(before, after)

    def steps(
        self,
        meta: TensorMeta,
        further: frozenset[Placement],
        banned: Banned = frozenset(),
        together: Together = ALONE,
    ) -> Steps:
        """The single steps between all layouts of a tensor, those that are ``banned`` left out.

        Args:
            further: the placements beside whole and cut that it may have; sums are always among them.
            together: in which collectives it travels with others (:meth:`together`).
        """

        def price(step: Step, size: IntArray, copied: IntArray) -> FloatArray:
            moves = ((step.kind, axis, dim) for axis in step.axes for dim in (-1, step.source))
            if not banned.isdisjoint(moves):
                return np.full(len(size), math.inf)
            return self._step_s(step, size, copied, together, contention)

        contention = self._contention
        key = (meta.shape, meta.dtype.itemsize, further | {P_SUM}, banned, together)
        if key not in self._steps:
            layouts = layouts_of(meta.shape, self._mesh, further | {P_SUM})
            self._steps[key] = single_steps(layouts, meta.shape, meta.dtype.itemsize, self._mesh, price)
        return self._steps[key]

    def together(self, ref: Ref) -> Together:
        """How a tensor travels, by the schedule (:mod:`autoshard.plans.schedule`)."""
        return self._together.get(ref, ALONE) if self.bucket_bytes else ALONE

    @cached_property
    def _together(self) -> dict[Ref, Together]:
        """Parameters, or what they are cast to, are gathered with all of their layer; gradients are reduced with all
        others. What hides costs no less than it takes where there is no contention, so nobody asks then what may.
        """
        graph, whole = self._graph, self._whole or self._graph
        moved, trained = _travelling(graph)
        of_all, every = (moved, trained) if whole is graph else _travelling(whole)
        layers: dict[str, int] = defaultdict(int)
        for ref, name in of_all.items():
            layers[layer_of(name)] += _size_bytes(whole.meta(ref))
        gradients = self._at_most(REDUCTIONS, sum(_size_bytes(whole.meta(ref)) for ref in every))
        found = {ref: self._at_most(GATHERS, layers[layer_of(name)]) for ref, name in moved.items()}
        found |= {
            ref: gradients._replace(is_written=self._is_written(ref))
            for ref in trained
            if graph.nodes[ref.node].kind != "parameter"
        }
        if self.hides:
            for ref in late_readers(self._graph, self._takes_time):
                found[ref] = found.get(ref, ALONE)._replace(is_early=True)
        for ref in read_late(self._graph) if self.gathers_ahead else ():
            found[ref] = found.get(ref, ALONE)._replace(is_early=self.hides, meets=False)
        return found

    def _is_written(self, ref: Ref) -> bool:
        """Whether a gradient is made where it travels (:meth:`autoshard.lowering.travelling.Travelling.place`)."""
        return self.gathers_ahead and self._graph.reads[ref] == 1 and self._graph.nodes[ref.node].op in INTO

    @property
    def hides(self) -> bool:
        """Whether what hides behind computation costs less than what does not."""
        return self._contention < 1 and self.bucket_bytes > 0

    def _takes_time(self, node: Node) -> bool:
        return not is_free(node) or self._profile.compute.issue_s > 0

    def read_at_once(self) -> Iterator[tuple[Ref, int, int]]:
        """Tensors that are priced as if they were early, but never are on their way to their first reader, as no
        operator that takes time stands before that: with it, and the position at which it takes the tensor.
        """
        if self.hides:
            yield from (found for found in at_once(self._graph, self._takes_time) if self._is_early_alone(found[0]))

    def _is_early_alone(self, ref: Ref) -> bool:
        return self.together(ref) == EARLY

    def unhidden_s(
        self, meta: TensorMeta, before: tuple[Layout, ...], after: tuple[Layout, ...], banned: Banned
    ) -> np.ndarray:
        """Seconds by which a tensor on its way from each layout to each other costs more, shape (len(before),
        len(after)), than it is priced as early; zero where no way leads.
        """

        def price(step: Step, size: IntArray, copied: IntArray) -> FloatArray:
            whole, hidden = (self._step_s(step, size, copied, *how) for how in ((), (EARLY, self._contention)))
            moves = ((step.kind, axis, dim) for axis in step.axes for dim in (-1, step.source))
            return whole - hidden if banned.isdisjoint(moves) else np.full(len(size), math.inf)

        key = (meta, before, after, banned, EARLY)
        if key not in self._matrices:
            layouts = layouts_of(meta.shape, self._mesh, further_placements(before + after) | {P_SUM})
            steps = single_steps(layouts, meta.shape, meta.dtype.itemsize, self._mesh, price)
            found, index = cheapest_paths(steps).seconds, {layout: i for i, layout in enumerate(layouts)}
            found = found[np.ix_([index[a] for a in before], [index[b] for b in after])]
            self._matrices[key] = np.where(np.isfinite(found), found, 0.0)
        return self._matrices[key]

    def _at_most(self, kinds: frozenset[str], size_bytes: int) -> Together:
        return Together(kinds, min(self.bucket_bytes, size_bytes))

    def along_s(
        self, meta: TensorMeta, path: tuple[Layout, ...], together: Together = ALONE
    ) -> tuple[tuple[Step, int, float], ...]:
        """Each step of a path with its bytes and its seconds, local copies included."""
        key = meta, path, together
        if key not in self._along:
            self._along[key] = tuple(self._along_s(meta, path, together))
        return self._along[key]

    def _along_s(
        self, meta: TensorMeta, path: tuple[Layout, ...], together: Together
    ) -> Iterator[tuple[Step, int, float]]:
        shape, itemsize = meta.shape, meta.dtype.itemsize
        for step, before in zip(steps_along(path), path):
            size, copied = (rule(step, before, shape, itemsize, self._mesh) for rule in (size_bytes, copied_bytes))
            seconds = self._step_s(step, np.array([size]), np.array([copied]), together)
            yield step, size, float(seconds[0])

    def _paths_of(self, steps: Steps) -> Paths:
        if id(steps) not in self._paths:
            self._paths[id(steps)] = cheapest_paths(steps)
        return self._paths[id(steps)]

    def _step_s(
        self, step: Step, size: IntArray, copied: IntArray, together: Together = ALONE, contention: float = 1.0
    ) -> FloatArray:
        """Seconds of a step, for each number of bytes that are sent and copied."""
        local: FloatArray = self._profile.copy_s(copied.astype(np.float64))
        if not step.communicates:
            return local
        travels = step.kind in together.kinds
        whole = np.maximum(size, together.size_bytes if travels else 0)
        sent = self.topology.collective_s(step.kind, step.axes, whole.astype(np.float64))
        sent = (sent + self._profile.meeting_s * together.meets) * (size / np.maximum(whole, 1))
        sent = sent + COLLECTIVE_OPERATORS * self._profile.compute.issue_s * (size > 0)
        if self._profile.bucket_copies and travels:
            copies = self._profile.copy_s(self._bucketed_bytes(step, size, together).astype(np.float64))
            sent = sent + np.where(whole > size, copies, 0.0)
        return sent * (contention if travels or together.is_early else 1.0) + local

    def _bucketed_bytes(self, step: Step, size: IntArray, together: Together) -> IntArray:
        """Bytes that are read and written to take a tensor into the buffer of a bucket and out of it again.

        What is gathered comes out of it by a copy, as what the ranks sent of a tensor lies apart; what is reduced stays
        where it is (:mod:`autoshard.lowering.travelling`), and a product that is all-reduced was written there.
        """
        if together.is_written and step.kind == "all_reduce":
            return np.zeros_like(size)
        gathers = step.kind == "all_gather"
        return 2 * (size // self._mesh.parts(step.axes) + size if gathers else size)

    def _addition_s(self, meta: TensorMeta, layout: Layout) -> float:
        """Seconds of adding a gradient to the sum of those before: both are read, and the sum is written."""
        elements = math.prod(self._local(meta.shape, layout))
        dtype = str(meta.dtype).removeprefix("torch.")
        return float(self._profile.op_s(dtype, float(elements), 3 * elements * meta.dtype.itemsize, "pointwise"))

    def _operator_s(self, node: Node, metas: tuple[TensorMeta, ...], strategy: Strategy, among: int = 1) -> float:
        """Seconds on the largest shards of a strategy; or with their flops and bytes shared out among so many ranks."""
        if is_left_out(node, strategy.inputs):
            return 0.0
        inputs = [self._local(meta.shape, layout) for meta, layout in zip(metas, strategy.inputs)]
        pairs = [(m, layout) for m, layout in zip(node.outputs, strategy.outputs) if m and layout]
        outputs = [self._local(meta.shape, layout) for meta, layout in pairs]
        read = [math.prod(shape) * meta.dtype.itemsize for shape, meta in zip(inputs, metas)]
        written = [math.prod(shape) * meta.dtype.itemsize for shape, (meta, _) in zip(outputs, pairs)]
        for k in unread(node, strategy.inputs):
            read[k] = 0
        if has(node, "rows"):
            read[0] = min(read[0], written[0])
        flops, kind = _flops(node, inputs, outputs)
        passes, blocks = known(node.op).passes, known(node.op).blocks
        share, further = blocks(node, inputs, strategy.inputs) if blocks else (1.0, 0)
        moved = (sum(read) + sum(written)) * (passes(node, metas, strategy.inputs) if passes else 1.0)
        dtype = str(pairs[0][0].dtype if pairs else torch.float32).removeprefix("torch.")
        launches_s = further * float(self._profile.op_s(dtype, 1.0, 0.0, kind)) if further else 0.0
        return launches_s + float(self._profile.op_s(dtype, share * flops / among, moved / among, kind))


def _travelling(graph: CapturedGraph) -> tuple[dict[Ref, str], list[Ref]]:
    """Parameters, or what they are cast to, with the names of the parameters; and gradients, before they are cast."""
    parameters = {Ref(i): node.name for i, node in graph.of_kind("parameter")}
    casts, reduced = ({rule(name): name for name in parameters.values()} for rule in (cast_name, reduced_name))
    operators = list(graph.of_kind("operator"))
    cast = {Ref(i): casts[node.name] for i, node in operators if node.name in casts}
    copied = set(cast.values())
    moved = cast | {ref: name for ref, name in parameters.items() if name not in copied}
    before_cast = {Ref(i): node.inputs[0] for i, node in operators if node.name in reduced}
    return moved, [before_cast.get(ref, ref) for _, ref in graph.gradients]


def repeated(each: Iterable[_T], times: Sequence[int]) -> Iterator[_T]:
    """What each node of a graph has, as often as it stands for one of the whole step; once where there are no times."""
    if not times:
        return iter(each)
    return itertools.chain.from_iterable(itertools.repeat(one, count) for one, count in zip(each, times, strict=True))


def _size_bytes(meta: TensorMeta) -> int:
    return math.prod(meta.shape) * meta.dtype.itemsize


def further_placements(layouts: Iterable[Layout]) -> frozenset[Placement]:
    """The placements of some layouts beside whole and cut: addends, and dims cut in parts."""
    return frozenset(placement for layout in layouts for placement in layout if placement.reduce or placement.parts)


def _flops(node: Node, inputs: list[Shape], outputs: list[Shape]) -> tuple[float, str]:
    """Floating-point operations on one shard, and the kind of kernel that does them.

    Products, convolutions and attention say their own; any other operator counts one per element of its largest result,
    and of what it reduces.
    """
    entry = known(node.op)
    if entry.flops is not None:
        return entry.flops(node, inputs, outputs), entry.kernel
    counted = (*inputs[:1], *outputs) if entry.kernel == "reduction" else outputs
    return float(max((math.prod(shape) for shape in counted), default=0)), entry.kernel
