"""The plan as a value: every placement decision of one training step, and what it was predicted to cost.

In memory a plan is flat: one entry per parameter, operator and redistribution. The file folds identical layers
(:mod:`autoshard.plans.text.plan_file`). Nothing here knows torch or a solver.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from cost_models.collective_kinds import RedistributionKind as CollectiveKind

from ..layout import Layout, batch_dim_of
from ..mesh import TOGETHER, Mesh
from ..micro_batches import redistribution_runs
from ..precision import AS_IT_IS, Precision
from ..recomputation import first_name
from .expert_distance import ExpertDistance
from .left_out import LeftOut
from .memory_outcome import MemoryOutcome
from .natural_order import natural_key

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")
IdenticalLayers = Literal["alike", "free", "unknown"]


@dataclass(frozen=True)
class TensorEntry:
    """A parameter, buffer, input or output: its name, global shape, dtype (``float32``) and layout."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout


@dataclass(frozen=True)
class OperatorEntry:
    """The strategy of one operator.

    ``name`` is module path, slash, role (``layers.0.attention.wq/mm``). ``inputs`` holds the layout wanted of each
    tensor argument in argument order; ``outputs`` the layout of each result, None for one that is not a tensor.
    """

    name: str
    phase: Phase
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout | None, ...]


@dataclass(frozen=True)
class Collective:
    """One collective of one rank: ``size_bytes`` is the larger of the rank's input and output buffer.

    ``axis`` is a mesh axis, or several whose ranks form one group: ``dp+tp``. ``predicted_s`` of one that travels with
    others is its part of their time.
    """

    kind: CollectiveKind
    axis: str
    size_bytes: int
    predicted_s: float

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it runs over."""
        return tuple(self.axis.split(TOGETHER))


@dataclass(frozen=True)
class Redistribution:
    """One tensor taken from one layout to another, once per phase however many operators want it.

    ``tensor`` is a parameter's FQN, an input's name or an operator's name (``name:1`` for its second result).
    ``path`` runs from the layout it has to the layout wanted; neighbours differ on exactly one mesh axis, so that each
    pair is one step. The first ``shared`` steps are not taken for this redistribution alone: another one of the tensor
    takes them, in the same phase. ``collectives`` are those of the other steps that communicate, in order; slices move
    nothing.
    ``consumers`` says for whom: the operators that want the last layout, the parameter whose gradient this is, or the
    output or buffer that holds the tensor. Empty where it is not known (a plan read from format 1).

    Where a redistribution of the backward is ``kept``, its shared steps do not run in the backward at all: it goes on
    from what the forward's redistributions of the tensor made along the same way, which stays in memory until then.
    """

    tensor: str
    phase: Phase
    path: tuple[Layout, ...]
    collectives: tuple[Collective, ...]
    kept: bool = False
    consumers: tuple[str, ...] = ()
    shared: int = 0

    def __hash__(self) -> int:
        """Of what no two redistributions of a plan have in common: plans are full of them, and look them up often."""
        return hash((self.tensor, self.phase, self.path))

    @property
    def own(self) -> tuple[Layout, ...]:
        """The layouts of the steps that are taken for it: the last one alone where there are none."""
        return self.path[self.shared :]

    @property
    def taken(self) -> tuple[tuple[Layout, ...], ...]:
        """The ways along which it takes its tensor itself: from the start of the path up to each of its own steps."""
        return tuple(self.path[: steps + 1] for steps in range(self.shared + 1, len(self.path)))

    @property
    def predicted_s(self) -> float:
        """Seconds of its collectives."""
        return math.fsum(collective.predicted_s for collective in self.collectives)


@dataclass(frozen=True)
class Execution:
    """An operator at its place in the step, and its predicted time on one rank, in whole nanoseconds."""

    name: str
    phase: Phase
    predicted_ns: int


@dataclass(frozen=True)
class SolverOutcome:
    """What the solver proved: ``status`` (``optimal``, ``feasible``), cost and bound in integer nanoseconds.

    ``gap`` is ``(cost - bound) / max(1, |cost|)``. The bound holds for all plans under the constraints where
    ``identical_layers`` is ``free``; where it is ``alike``, for those that decide identical layers alike, which is how
    the plan was found; ``unknown`` in a plan read from a file that does not say. Where ``layer_groups`` names groups of
    such layers (``layers.{0-4}``, ``layers.{5-31}``), it is those of a group that are decided alike.
    """

    status: str
    cost_ns: int
    bound_ns: int
    gap: float
    identical_layers: IdenticalLayers = "unknown"
    layer_groups: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, cost_ns: int, bound_ns: int, identical_layers: IdenticalLayers, layer_groups: tuple[str, ...] = ()
    ) -> SolverOutcome:
        """The outcome of a cost and a bound, from which status and gap follow."""
        status = "optimal" if cost_ns == bound_ns else "feasible"
        # the gap as solver.solution.relative_gap has it: whoever reads plans loads no solver
        gap = (cost_ns - bound_ns) / max(1, abs(cost_ns))
        return cls(status, cost_ns, bound_ns, gap, identical_layers, layer_groups)

    def having(self, cost_ns: int, bound_ns: int) -> SolverOutcome:
        """The outcome of another cost and bound of a plan whose layers were decided in the same way."""
        return self.of(cost_ns, bound_ns, self.identical_layers, self.layer_groups)

    @property
    def verdict(self) -> str:
        """The status as people read it: ``optimal with identical layers decided alike``."""
        groups = f" in {len(self.layer_groups)} groups, {' and '.join(self.layer_groups)}" * bool(self.layer_groups)
        return (
            self.status
            + {
                "alike": f" with identical layers decided alike{groups}",
                "free": "",
                "unknown": ", perhaps with identical layers decided alike",
            }[self.identical_layers]
        )


class Sections(NamedTuple):
    """The entries of a plan of which every layer has its own."""

    parameters: tuple[TensorEntry, ...]
    buffers: tuple[TensorEntry, ...]
    operators: tuple[OperatorEntry, ...]
    redistributions: tuple[Redistribution, ...]
    execution: tuple[Execution, ...]


@dataclass(frozen=True, eq=False)
class MadeOf:
    """What a plan was made of: the layers left out, and its sections without them and with them."""

    left_out: tuple[LeftOut, ...]
    short: Sections
    whole: Sections


@dataclass(frozen=True)
class ShardingPlan:
    """A complete plan. Equal plans write equal bytes.

    Parameters, buffers, operators and redistributions are looked up by name (and phase), so the order they are given in
    means nothing: construction puts them in the canonical order, forward before backward, then by name with numbers as
    numbers (:func:`~autoshard.plans.natural_order.natural_key`). Inputs, outputs and pins keep the order given.

    ``execution`` holds every operator once, in the order one rank runs them, forward before backward; empty where it is
    not known (a plan read from format 1).

    ``fingerprint`` is a digest of the captured graph (operators, shapes, arguments; never the device it was traced on);
    ``hardware_fingerprint`` is a digest of the profile the plan was priced with. ``call`` describes how the model is
    called (:mod:`autoshard.capture.calls`; empty where it cannot). ``pins`` are the constraints it was made under, as
    given. A step has ``micro_batches``, of which the operators and redistributions are those of one; the names of
    those that stand for what is held over the step say so (:mod:`autoshard.micro_batches`). ``bucket_bytes`` is how
    much travels together at most, and decides the schedule (:mod:`autoshard.plans.schedule`) with ``gathers_ahead``:
    whether parameters are gathered before they are needed; 0 where every collective is waited for where it stands.
    ``deferred`` names the operators of the forward, and the results, that are waited for and run when the caller reads
    such a result, at the latest as the backward ends.
    ``batch_dim`` is the dim of the batch in inputs: 1 for a model that takes (steps, rows).
    ``precision`` says in which dtypes the step computes and reduces. ``contention`` is the hardware's: the share of its
    time that a collective costs although it runs beside computation.
    ``compute_s``, ``communication_s`` and ``optimizer_s``, the step of the optimizer whose state is counted, add up to
    the predicted step time. ``optimizer_s`` is None for a plan from before the optimizer's step had a price, ``memory``
    for one that was written before plans knew of memory. ``at_peak_s`` is what the model's products, convolutions and
    attention take at least, shared out evenly at the peak of the hardware; None where it is not known. ``against`` is
    the distance to the best plan of experts under the same constraints; None where nobody asked for it.
    ``network`` says of each axis, in words, what the profile has for it in the order of ranks that ``mesh`` has; empty
    where that is not known.
    """

    model: str
    fingerprint: str
    call: str
    mesh: Mesh
    hardware: str
    hardware_fingerprint: str
    objective: str
    pins: tuple[str, ...]
    solver: SolverOutcome
    compute_s: float
    communication_s: float
    parameters: tuple[TensorEntry, ...]
    buffers: tuple[TensorEntry, ...]
    inputs: tuple[TensorEntry, ...]
    outputs: tuple[TensorEntry, ...]
    operators: tuple[OperatorEntry, ...]
    redistributions: tuple[Redistribution, ...]
    optimizer_s: float | None = None
    at_peak_s: float | None = None
    memory: MemoryOutcome | None = None
    execution: tuple[Execution, ...] = ()
    micro_batches: int = 1
    bucket_bytes: int = 0
    gathers_ahead: bool = True
    deferred: tuple[str, ...] = ()
    precision: Precision = AS_IT_IS
    contention: float = 1.0
    against: ExpertDistance | None = None
    network: tuple[str, ...] = ()
    batch_dim: int = 0
    left_out: tuple[LeftOut, ...] = ()
    made_of: MadeOf | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        orders: dict[str, Callable[[Any], Any]] = {
            "parameters": lambda e: natural_key(e.name),
            "buffers": lambda e: natural_key(e.name),
            "operators": lambda e: (e.phase != "forward", natural_key(e.name)),
            "redistributions": lambda e: (e.phase != "forward", natural_key(e.tensor), e.path),
            "execution": lambda e: e.phase != "forward",
        }
        for section, order in orders.items():
            entries = getattr(self, section)
            if type(entries) is not InOrder:  # those of a plan of which this one is a copy are
                each = map(_with_consumers_sorted, entries) if section == "redistributions" else entries
                object.__setattr__(self, section, InOrder(sorted(each, key=order)))

    def shortened(self) -> ShardingPlan:
        """The plan without layers that are as others, which stands for this one, where it was made of such a plan and
        has all entries as they were made; else this one itself.
        """
        made = self.made_of
        if made is None or any(mine is not its for mine, its in zip(self.sections, made.whole)):
            return self
        return replace(self.having(made.short), left_out=made.left_out)

    def made(self, left_out: tuple[LeftOut, ...], whole: Sections) -> ShardingPlan:
        """The plan of all layers that this one stands for, which has these sections."""
        return replace(self.having(whole), made_of=MadeOf(left_out, self.sections, whole))

    def times(self, name: str) -> int:
        """How many entries of the plan of all layers an entry of this name stands for; 1 where none is left out."""
        return math.prod(out.times(name) for out in self.left_out)

    def like_name(self, name: str) -> str:
        """The name of the entry that stands for one of the plan of all layers."""
        for out in self.left_out:
            name = out.like_name(name)
        return name

    @property
    def sections(self) -> Sections:
        """What there is of every layer."""
        return Sections(self.parameters, self.buffers, self.operators, self.redistributions, self.execution)

    def having(self, sections: Sections) -> ShardingPlan:
        """The plan with other sections."""
        return replace(
            self,
            parameters=sections.parameters,
            buffers=sections.buffers,
            operators=sections.operators,
            redistributions=sections.redistributions,
            execution=sections.execution,
            made_of=None,
        )

    @property
    def has_backward(self) -> bool:
        """Whether it is of a step with gradients; of a forward alone otherwise, as for evaluation."""
        return any(entry.phase == "backward" for entry in self.operators)

    @property
    def step_s(self) -> float:
        """The predicted step time in seconds if nothing overlapped (:func:`autoshard.plans.simulation.overlapped_s`
        counts what does), without the optimizer's step where its price is not known.
        """
        return self.compute_s + self.communication_s + (self.optimizer_s or 0.0)

    def hiding_s(self, hidden_s: float) -> float:
        """The step in seconds where so many of them run beside others, at the ``contention`` of that:
        ``step_s - (1 - contention) * hidden_s``.
        """
        return self.step_s - (1 - self.contention) * hidden_s

    @property
    def mfu(self) -> float | None:
        """The predicted share of the hardware's peak that the model's own arithmetic takes; None where not known."""
        return None if self.at_peak_s is None or not self.step_s > 0 else self.at_peak_s / self.step_s

    @property
    def recomputed(self) -> tuple[str, ...]:
        """The operators of the forward that the backward computes again, by name."""
        firsts = (first_name(entry.name) for entry in self.operators if entry.phase == "backward")
        return tuple(name for name in firsts if name is not None)

    @property
    def batch(self) -> int | None:
        """The size of the batch, that of the first input that has dims; None where none has."""
        return next((e.shape[self.batch_dim] for e in self.inputs if len(e.shape) > self.batch_dim), None)

    def batch_dim_of(self, shape: tuple[int, ...]) -> int | None:
        """The dim of an input or a result of this shape that is the batch; None where none is as long."""
        return batch_dim_of(shape, self.batch, self.batch_dim)

    def runs(self, entry: Redistribution) -> int:
        """How often a redistribution runs in a step: once, or in each micro-batch."""
        return redistribution_runs(entry.tensor, entry.consumers, self.micro_batches)

    @property
    def links(self) -> tuple[str, ...]:
        """What collectives run over: the axes of the mesh, and those that some run over together."""
        together = {collective.axis for _, collective in self.collectives()} - set(self.mesh.axes)
        return *self.mesh.axes, *sorted(together, key=self.mesh.indices)

    def collectives(self) -> Iterator[tuple[Phase, Collective]]:
        """Every collective of one rank's step, with its phase, each by itself.

        :func:`autoshard.plans.schedule.sent` says which run together.
        """
        for redistribution in self.redistributions:
            for collective in redistribution.collectives:
                yield from [(redistribution.phase, collective)] * self.runs(redistribution)


class InOrder(tuple[Any, ...]):
    """Entries of a plan in the canonical order, which whoever makes it answers for."""

    __slots__ = ()


def _with_consumers_sorted(entry: Redistribution) -> Redistribution:
    ordered = tuple(sorted(set(entry.consumers), key=natural_key))
    return entry if ordered == entry.consumers else replace(entry, consumers=ordered)
