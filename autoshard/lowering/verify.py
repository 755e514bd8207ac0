"""Compares the collectives of a lowered program with those of its plan: kind, axis, bytes and count, phase by phase.

Of the schedule's buckets, the order too: in whose turn each collective is issued, and waited for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import cast

from torch import fx

from ..errors import VerificationError
from ..plans import PHASES, Phase, ShardingPlan
from ..plans.schedule import END, Schedule, schedule
from .adapter import COLLECTIVES, WAIT, collective_name, is_collective
from .late_part import late_nodes
from .local_program import LocalProgram

Key = tuple[str, str, int]
_Turn = tuple[str, str, Key]


def verify(program: LocalProgram, plan: ShardingPlan, groups: Mapping[str, str], whole: bool = True) -> None:
    """Checks that a program does what its plan says.

    The bytes are those of the values in the graph, worked out by torch as the graph was written.

    Args:
        groups: the names of process groups, by the mesh axis that they are along, or the axes.
        whole: whether nothing may be missing: not so for a backward that only some results need.

    Raises:
        VerificationError: a collective is missing, is too many, or differs; the message names the first ones.
    """
    axes = {group: axis for axis, group in groups.items()}
    planned: dict[str, Counter[Key]] = {"forward": Counter(), "backward": Counter()}
    once: dict[str, Counter[Key]] = {"forward": Counter(), "backward": Counter()}
    planned_schedule = schedule(plan) if whole else program.schedule
    for entry in plan.redistributions:
        is_once = plan.micro_batches > 1 and plan.runs(entry) == 1
        for collective in entry.collectives if entry not in planned_schedule.members else ():
            key = collective.kind, collective.axis, collective.size_bytes
            (once if is_once else planned)[entry.phase][key] += 1
    for bucket in planned_schedule.buckets:
        planned[bucket.phase].update((travel.kind, travel.axis, travel.size_bytes) for travel in bucket.travels)
    for phase, modules in (("forward", program.once.gathers), ("backward", program.once.reductions)):
        found = sum((collectives_of(module.graph, axes) for module in modules.values()), Counter[Key]())
        if found != once[phase]:
            raise VerificationError(_difference(f"{phase} that is run once in a step", once[phase], found))
    for phase, module in zip(PHASES, (program.forward, program.backward)):
        found = collectives_of(module.graph, axes) if module is not None else Counter()
        if found - planned[phase] or (whole and found != planned[phase]):
            raise VerificationError(_difference(phase, planned[phase], found))
        planned_turns = list(_planned_turns(plan, phase, planned_schedule))
        found_turns = [] if module is None else list(_turns(module.graph, axes))
        if found_turns != planned_turns:
            pairs = zip_longest(found_turns, planned_turns)
            graph_has, plan_has = next((_text(a), _text(b)) for a, b in pairs if a != b)
            raise VerificationError(
                f"the {phase} of the lowered graph does not keep to the schedule of its plan: it has {graph_has}, the "
                f"plan {plan_has}"
            )
    _check_late(program, plan)


def _check_late(program: LocalProgram, plan: ShardingPlan) -> None:
    """Checks that of the forward those operators run late that the plan defers, and that their results are numbers."""
    late = late_nodes(program.forward.graph, program.late, program.deferred) if program.late else {}
    labels = {node: node.meta["label"] for node in program.forward.graph.nodes if "label" in node.meta}
    own = {node: label.operator for node, label in labels.items() if not label.is_copy and label.operator != END}
    found = {own[node] for node in late if node in own}
    wanted = set(plan.deferred) & set(own.values())
    if found != wanted:
        raise VerificationError(
            f"the plan defers {sorted(wanted)} to when the caller reads the results, but of the lowered forward "
            f"{sorted(found)} can run then"
        )
    for k in program.late:
        value = program.forward.values[k]
        if value is None or value.dim() or not value.is_floating_point():
            raise VerificationError(f"the plan defers output.{k}, which is no floating number without dims")


def _planned_turns(plan: ShardingPlan, phase: Phase, planned: Schedule) -> Iterator[_Turn]:
    turns = planned.turns(phase)
    for operator in (*(entry.name for entry in plan.execution if entry.phase == phase), END):
        for turn in turns.get(operator, ()):
            travel = planned.buckets[turn.bucket].travels[turn.travel]
            yield operator, turn.what, (travel.kind, travel.axis, travel.size_bytes)


def _turns(graph: fx.Graph, axes: dict[str, str]) -> Iterator[_Turn]:
    """The collectives of buckets, as they are issued and waited for."""
    for node in graph.nodes:
        label = node.meta.get("label")
        if label is None or label.bucket is None or collective_name(node) is None:
            continue
        issued = node.all_input_nodes[0] if node.target is WAIT else node
        yield label.operator, "issue" if issued is node else "wait", _key(issued, axes)


def _key(node: fx.Node, axes: dict[str, str]) -> Key:
    kind = collective_name(node)
    assert kind is not None
    return kind, axes[str(node.args[-1])], _largest(node)


def collectives_of(graph: fx.Graph, axes: dict[str, str]) -> Counter[Key]:
    """The collectives of a graph, as (kind, axis, bytes of the larger buffer); ``axes`` names the axis of each group.

    Raises:
        VerificationError: the graph has a collective that no plan can have.
    """
    found: Counter[Key] = Counter()
    for node in graph.nodes:
        if node.op == "call_function" and is_collective(node.target):
            if node.target not in COLLECTIVES or node.args[-1] not in axes:
                raise VerificationError(f"the lowered graph runs {node.format_node()}, which no plan contains")
            found[_key(node, axes)] += 1
    return found


def _largest(node: fx.Node) -> int:
    values = (node.meta["val"], cast(fx.Node, node.args[0]).meta["val"])
    return max(int(value.numel() * value.element_size()) for value in values)


def _text(turn: _Turn | None) -> str:
    if turn is None:
        return "nothing more"
    operator, what, (kind, axis, size) = turn
    return f"a turn before {operator} to {what} {kind} over {axis} of {size} bytes"


def _difference(phase: str, planned: Counter[Key], found: Counter[Key]) -> str:
    missing, extra = planned - found, found - planned
    parts = []
    for what, counter in (("planned but not in the graph", missing), ("in the graph but not planned", extra)):
        listed = [f"{n} x {kind} over {axis} of {size} bytes" for (kind, axis, size), n in sorted(counter.items())[:5]]
        if listed:
            parts.append(f"{what}: {', '.join(listed)}")
    return f"the {phase} of the lowered graph does not communicate as planned; " + "; ".join(parts)
