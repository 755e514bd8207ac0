"""What in a plan follows from its other fields is worked out again; a plan that contradicts itself is refused.

A plan holds decisions (layouts and strategies) and a record of what they were found to amount to. Two kinds of
contradiction are told apart:

* within the record (:func:`check_record`): a gap that cost and bound do not give, totals that the operators and
  redistributions do not add up to, bytes that a path does not move. No honest file has one.
* between decisions and record (:func:`check_decisions`): a redistribution from a layout that its tensor does not have,
  bytes of parameters that their layouts do not give. A file has them after a layout was edited by hand, and until
  ``autoshard replan`` has written the rest anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import product

from cost_models.spelling import closest

from ...layout import Layout, format_layout, local_shape
from ...mesh import Mesh
from ...micro_batches import operator_runs
from ...redistribution import size_bytes, steps_along
from ..dtypes import DTYPE_BYTES
from ..expert_distance import SENT, ExpertDistance, Role
from ..memory_outcome import MemoryOutcome, MemoryPoint
from ..natural_order import starred
from ..plan import Phase, Redistribution, ShardingPlan, SolverOutcome, TensorEntry
from ..simulation import overlapped_s
from .notation import check_redistribution, format_path

COUNTED: Mapping[str, tuple[str, Callable[[ShardingPlan], float]]] = {
    "step-time": ("compute_s, communication_s and optimizer_s", lambda plan: plan.step_s),
    "overlapped-step-time": ("compute_s, communication_s and optimizer_s, less what hides,", overlapped_s),
    "communication-time": ("communication_s", lambda plan: plan.communication_s),
}
"""The seconds that the cost of a plan counts, by objective, and their name."""

OUTSIDE = frozenset({"results", "step"})
"""What a point of the memory's course may name beside operators: the end of a phase, the optimizer."""

FLOAT = 1e-9
"""How far sums of seconds may differ that were added up in another order."""


class Contradiction(ValueError):
    """Two parts of a plan that do not fit together. ``path`` leads to the part in the file; for a redistribution or a
    tensor it ends in the entry itself, whose line the file's reader knows.
    """

    def __init__(self, said: str, *path: str | Redistribution | TensorEntry) -> None:
        super().__init__(said)
        self.path = path


class Misspelt(Contradiction):
    """A tensor whose name is known nowhere else in the plan, where one of a like name is missing."""


def check_record(plan: ShardingPlan) -> None:
    """Checks that what a plan records is what its other records give.

    Raises:
        Contradiction: it is not; the message names both values.
    """
    _check_solver(plan.solver)
    _check_names(plan)
    _check_ways(plan)
    _check_compute(plan)
    _check_communication(plan)
    _check_cost(plan)
    if plan.against is not None:
        _check_against(plan, plan.against)


def check_decisions(plan: ShardingPlan) -> None:
    """Checks that what a plan records is recorded of its layouts and strategies.

    Raises:
        Misspelt: a tensor has another name than the redistributions give it.
        Contradiction: it is not; the message names both.
    """
    held, wanted = _held(plan), _wanted(plan)
    _check_spelling(plan, {*held, *(name for _, name in wanted)})
    for entry in plan.redistributions:
        _check_ends(entry, plan.mesh, held, wanted)
    if plan.memory is not None:
        _check_memory(plan, plan.memory)


def _check_solver(solver: SolverOutcome) -> None:
    cost, bound = f"a cost of {solver.cost_ns} ns", f"a bound of {solver.bound_ns} ns"
    right = solver.having(solver.cost_ns, solver.bound_ns)
    if solver.bound_ns > solver.cost_ns:
        raise Contradiction(f"{cost} is below {bound}, but no plan costs less than the bound", "result", "bound_ns")
    if not math.isclose(solver.gap, right.gap, rel_tol=FLOAT):
        raise Contradiction(f"the gap is {solver.gap}, but {cost} and {bound} give {right.gap}", "result", "gap")
    if solver.status != right.status:
        raise Contradiction(
            f"the status is {solver.status}, but {cost} and {bound} are {right.status}", "result", "status"
        )


def _check_names(plan: ShardingPlan) -> None:
    """Redistributions and consumers are looked up by name, whatever section has it."""
    tensors = Counter(entry.name for entry in (*plan.parameters, *plan.buffers, *plan.inputs))
    operators = Counter(entry.name for entry in plan.operators)
    for names, where in ((tensors, "parameters, buffers and inputs"), (operators, "operators of both phases")):
        for name, times in names.items():
            if times > 1:
                raise Contradiction(f"{name!r} is named {times} times among the {where}")
    may_wait = {entry.name for entry in plan.operators if entry.phase == "forward"}
    may_wait |= {entry.name for entry in plan.outputs}
    for name in plan.deferred:
        if name not in may_wait:
            raise Contradiction(f"{name!r} is deferred, but no operator of the forward and no output", "deferred")


def _check_ways(plan: ShardingPlan) -> None:
    """Every redistribution by itself; and that a tensor goes one way between two layouts in a phase, and that somebody
    takes the steps that are shared: the forward those that the backward is to find kept.
    """
    sources = {entry.name: entry for entry in (*plan.parameters, *plan.buffers, *plan.inputs)}
    holders = {entry.name: entry for entry in (*plan.parameters, *plan.buffers, *plan.outputs)}
    taken = {(entry.tensor, entry.phase, way) for entry in plan.redistributions for way in entry.taken}
    ends: dict[tuple[str, Phase, Layout, Layout], Redistribution] = {}
    right: set[object] = set()
    for entry in plan.redistributions:
        way = entry.phase, entry.path, entry.collectives, entry.kept, entry.shared  # identical layers go the same
        if way not in right:
            try:
                check_redistribution(entry, plan.mesh)
            except ValueError as error:
                raise Contradiction(f"{entry.tensor}: {error}", entry) from None
            right.add(way)
        _check_bytes(entry, plan, sources, holders)
        if entry.shared:
            phase: Phase = "forward" if entry.kept else entry.phase
            first = entry.path[: entry.shared + 1]
            if (entry.tensor, phase, first) not in taken:
                what = "is kept from the forward" if entry.kept else f"shares steps in the {phase}"
                raise Contradiction(f"{entry.tensor} {what}, where nothing takes it along the same path", entry)
        other = ends.setdefault((entry.tensor, entry.phase, entry.path[0], entry.path[-1]), entry)
        if other is not entry:
            ways = " and ".join(format_path(path, plan.mesh) for path in (other.path, entry.path))
            raise Contradiction(f"{entry.tensor} goes two ways in the {entry.phase}: {ways}", entry)


# Totals. Costs are whole nanoseconds, rounded operator by operator, step by step (in older plans redistribution by
# redistribution) and, what the optimizer takes, parameter by parameter, so that each part may be off by a half.


def _check_compute(plan: ShardingPlan) -> None:
    runs = (plan.times(entry.name) * operator_runs(entry.name, plan.micro_batches) for entry in plan.execution)
    run_ns = sum(times * entry.predicted_ns for times, entry in zip(runs, plan.execution))
    if plan.execution and not _near(run_ns, plan.compute_s * 1e9, plan.micro_batches * _operators(plan)):
        said = f"compute_s is {plan.compute_s}, but the operators of the execution take {run_ns / 1e9} s together"
        raise Contradiction(said, "result", "compute_s")


def _check_communication(plan: ShardingPlan) -> None:
    """``communication_s`` against the collectives in the file; slices take time too, which the file does not list."""
    every = plan.redistributions
    sent_s = math.fsum(plan.times(entry.tensor) * plan.runs(entry) * entry.predicted_s for entry in every)
    slices = any(not step.communicates for entry in every for step in steps_along(entry.own))
    more_s, rounded_s = plan.communication_s - sent_s, FLOAT * (1e-9 + sent_s)
    if more_s < -rounded_s or (not slices and more_s > rounded_s):
        alone = "" if slices else ", and nothing else is moved"
        said = f"communication_s is {plan.communication_s}, but the collectives take {sent_s} s together{alone}"
        raise Contradiction(said, "result", "communication_s")


def _check_cost(plan: ShardingPlan) -> None:
    if plan.objective not in COUNTED:
        raise Contradiction(f"unknown objective {plan.objective!r}; expected {' or '.join(COUNTED)}", "objective")
    parts, counted_s = COUNTED[plan.objective]
    ns = counted_s(plan) * 1e9
    steps = sum(plan.times(entry.tensor) * len(entry.own) for entry in plan.redistributions)
    parameters = sum(plan.times(entry.name) for entry in plan.parameters)
    rounded = plan.micro_batches * (_operators(plan) + steps) + parameters
    if not _near(plan.solver.cost_ns, ns, rounded):
        said = f"the cost is {plan.solver.cost_ns} ns, but {parts} give {round(ns)} ns"
        raise Contradiction(said, "result", "cost_ns")


def _check_against(plan: ShardingPlan, against: ExpertDistance) -> None:
    """The differences from the best plan of experts add up to the distance, in each of the three kinds of time."""
    kinds: tuple[tuple[str, tuple[Role, ...], float, float], ...] = (
        ("compute_s", ("computation",), against.compute_s, plan.compute_s),
        ("communication_s", SENT, against.communication_s, plan.communication_s),
        ("optimizer_s", ("optimizer",), against.optimizer_s, plan.optimizer_s or 0.0),
    )
    for name, roles, theirs_s, ours_s in kinds:
        saved_s, right_s = against.saved_s(roles), theirs_s - ours_s
        # the times of operators, from which those of parts are added up, are whole nanoseconds
        if abs(saved_s - right_s) > plan.micro_batches * _operators(plan) * 1e-9 + FLOAT * (ours_s + theirs_s):
            said = f"the parts of against save {saved_s} s of {name}, but {theirs_s} s there and {ours_s} s here are"
            raise Contradiction(f"{said} {right_s} s apart", "result", "against")


def _operators(plan: ShardingPlan) -> int:
    """How many operators there are, with those that stand for others."""
    return sum(plan.times(entry.name) for entry in plan.operators) if plan.left_out else len(plan.operators)


def _near(whole: int, exact: float, rounded: int) -> bool:
    """Whether a sum of so many rounded numbers may be that of the exact ones."""
    return abs(whole - exact) <= 1 + rounded / 2 + FLOAT * abs(exact)


def _check_bytes(
    entry: Redistribution,
    plan: ShardingPlan,
    sources: Mapping[str, TensorEntry],
    holders: Mapping[str, TensorEntry],
) -> None:
    """The bytes of a redistribution follow from its path where the plan says the shape: that of the tensor itself, or
    of the parameter whose gradient it is, or of the output or buffer that holds it. Results of operators have none.
    """
    tensor = next((holders[name] for name in entry.consumers if name in holders), sources.get(entry.tensor))
    if tensor is None:
        return
    if any(placement.dim >= len(tensor.shape) for layout in entry.path for placement in layout):
        raise Contradiction(
            f"{entry.tensor} is {tensor.dtype}{list(tensor.shape)}, which has not all the dims that its path "
            f"{format_path(entry.path, plan.mesh)} cuts",
            entry,
        )
    sent = ((step, before) for step, before in zip(steps_along(entry.own), entry.own) if step.communicates)
    for (step, before), collective in zip(sent, entry.collectives):
        size = size_bytes(step, before, tensor.shape, DTYPE_BYTES[tensor.dtype], plan.mesh)
        if collective.size_bytes != size:
            raise Contradiction(
                f"the {step.kind} over {collective.axis} of {entry.tensor} is said to move {collective.size_bytes} "
                f"bytes, but {tensor.dtype}{list(tensor.shape)} in the layout {format_layout(before, plan.mesh)} makes "
                f"it {size}",
                entry,
            )


def _held(plan: ShardingPlan) -> dict[str, Layout]:
    """The layout in which every tensor is made, by the name that redistributions give it."""
    held = {entry.name: entry.layout for entry in (*plan.parameters, *plan.buffers, *plan.inputs)}
    held |= {f"grad.{entry.name.removeprefix('output.')}": entry.layout for entry in plan.outputs}
    for operator in plan.operators:
        for k, layout in enumerate(operator.outputs):
            if layout is not None:
                held[f"{operator.name}:{k}" if k else operator.name] = layout
    return held


def _wanted(plan: ShardingPlan) -> dict[tuple[Phase, str], tuple[Layout, ...]]:
    """The layouts that each consumer can want of a tensor, by phase: a parameter those of its gradient, and of what is
    written into it.
    """
    wanted: dict[tuple[Phase, str], tuple[Layout, ...]] = {
        ("forward", entry.name): (entry.layout,) for entry in (*plan.outputs, *plan.buffers, *plan.parameters)
    }
    wanted |= {("backward", entry.name): (entry.layout,) for entry in plan.parameters}
    return wanted | {(entry.phase, entry.name): entry.inputs for entry in plan.operators}


def _check_spelling(plan: ShardingPlan, known: Collection[str]) -> None:
    """A name that redistributions know and the plan does not is that of a tensor which none of them knows, if alike."""
    moved = dict.fromkeys(name for entry in plan.redistributions for name in (entry.tensor, *entry.consumers))
    missing = [name for name in moved if name not in known and "/" not in name]  # no operators
    tensors = (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs)
    unmoved = {entry.name: entry for entry in tensors if entry.name not in moved} if missing else {}
    for name in missing:
        found = closest(name, unmoved)
        if found is not None:
            said = f"no redistribution knows {found!r}, and {name!r}, which is redistributed, is no tensor of the plan"
            raise Misspelt(f"{said}; did you mean {name!r}?", unmoved[found])


def _check_ends(
    entry: Redistribution,
    mesh: Mesh,
    held: Mapping[str, Layout],
    wanted: Mapping[tuple[Phase, str], tuple[Layout, ...]],
) -> None:
    if entry.tensor not in held:
        raise Contradiction(f"{entry.tensor} is redistributed, but is no tensor of the plan", entry)
    first, last = entry.path[0], entry.path[-1]
    if held[entry.tensor] != first:
        raise Contradiction(
            f"{entry.tensor} is redistributed from {format_layout(first, mesh)}, but its layout is "
            f"{format_layout(held[entry.tensor], mesh)}",
            entry,
        )
    for name in entry.consumers:
        layouts = wanted.get((entry.phase, name), ())
        if last not in layouts:
            asks = " and ".join(dict.fromkeys(format_layout(layout, mesh) for layout in layouts))
            raise Contradiction(
                f"{entry.tensor} is redistributed to {format_layout(last, mesh)} for {name}, "
                + (f"which wants {asks}" if layouts else f"which the plan does not have in the {entry.phase}"),
                entry,
            )


def _check_memory(plan: ShardingPlan, memory: MemoryOutcome) -> None:
    found = (memory.parameter_bytes, memory.buffer_bytes, memory.input_bytes)
    ranks = dict(_held_bytes(plan))
    if found not in ranks.values():
        names = "parameters, buffers and inputs"
        raise Contradiction(
            f"the {names} are said to hold {', '.join(map(str, found))} bytes, but their layouts give the first rank "
            f"{', '.join(map(str, next(iter(ranks.values()))))}",
            "memory",
            "static_bytes",
        )
    if memory.gradient_bytes > memory.parameter_bytes:
        raise Contradiction(
            f"gradients hold {memory.gradient_bytes} bytes, more than the {memory.parameter_bytes} of all parameters",
            "memory",
            "static_bytes",
        )
    operators = {(entry.phase, entry.name) for entry in plan.operators}
    operators |= {("backward", name) for name in plan.deferred}
    for where, points in (("peak", (memory.peak,)), ("timeline", memory.timeline)):
        for point in points:
            if point.operator not in OUTSIDE and (point.phase, plan.like_name(point.operator)) not in operators:
                raise Contradiction(_no_operator(point), "memory", where)
    again = {starred(name) for name in plan.recomputed}
    for each in memory.saved:
        if each.operator not in again:
            raise Contradiction(
                f"computing {each.operator} again is said to save {each.size_bytes} bytes, but the backward does not",
                "memory",
                "saved",
            )
    if memory.over_bytes and memory.soft_ms_per_gib is None:
        margin = f", {memory.reserved_bytes} with the allocator's margin," if memory.allocator_margin else ""
        raise Contradiction(
            f"the peak of {memory.peak.size_bytes} bytes{margin} is above the budget of {memory.budget_bytes} that the "
            "plan was made under",
            "memory",
            "budget_bytes",
        )


def _no_operator(point: MemoryPoint) -> str:
    return f"the memory's course names {point.operator!r}, which is no operator of the {point.phase}"


def _held_bytes(plan: ShardingPlan) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What parameters, buffers and inputs hold on the ranks at the corners of the mesh, of which one is the fullest."""
    mesh = plan.mesh
    for coordinate in product(*(sorted({0, size - 1}) for size in mesh.shape)):
        yield (
            coordinate,
            tuple(
                sum(plan.times(e.name) * _local_bytes(e, mesh, coordinate) for e in entries)
                for entries in (plan.parameters, plan.buffers, plan.inputs)
            ),
        )


def _local_bytes(entry: TensorEntry, mesh: Mesh, coordinate: tuple[int, ...]) -> int:
    return math.prod(local_shape(entry.shape, entry.layout, mesh, coordinate)) * DTYPE_BYTES[entry.dtype]
