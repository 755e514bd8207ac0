"""What earns the distance between a plan and an expert's for the same step: the times of both, part by part.

Example, on two axes: where the expert (``ddp+sp``) has every weight whole along dp and all-reduces its gradient, and
the plan has cut weights that it gathers, the part *layers.*, parameters* is what both send for that, gathers and
reductions together; *the optimizer* says what it saves that each rank updates a block alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ..layout import Layout, format_layout
from ..micro_batches import held_name, operator_runs, summed_name
from ..precision import cast_name, reduced_name, to_reduce_name
from .expert_distance import (
    MOST_OF_PART,
    MOST_PARTS,
    MOST_TENSORS,
    MOST_TEXT,
    OTHERS,
    ROLES,
    ExpertDistance,
    PartDifference,
    Role,
    TensorDifference,
    block_of,
)
from .natural_order import starred
from .plan import Redistribution, ShardingPlan

LEAST = 0.01
"""The share of the largest difference below which one is not told apart from others."""

MOST_EXPENSIVE = 12
"""Of how many of the tensors for which the plan sends most it is said what the expert's does with them."""

_Part = tuple[str, Role]


def distance(plan: ShardingPlan, expert: str, theirs: ShardingPlan) -> ExpertDistance:
    """The distance of a plan to an expert's plan for the same graph on the same mesh; of both, all operators are timed.

    Args:
        expert: the name of the baseline that ``theirs`` is a plan of.
    """
    ours, other = _Attribution(plan), _Attribution(theirs)
    parts: list[PartDifference] = []
    within: list[list[_Tensor]] = []
    for part in dict.fromkeys((*ours.times, *other.times)):
        mine, their = ours.times.get(part, {}), other.times.get(part, {})
        parts.append(PartDifference(*part, math.fsum(mine.values()), math.fsum(their.values())))
        names = sorted({*mine, *their} - {""})
        within.append([_Tensor(name, part[1], mine.get(name, 0.0), their.get(name, 0.0)) for name in names])
    return ExpertDistance(
        expert,
        theirs.solver.cost_ns,
        theirs.compute_s,
        theirs.communication_s,
        theirs.optimizer_s or 0.0,
        0 if theirs.memory is None else theirs.memory.peak.size_bytes,
        tuple(_fewer(part for part in parts if part.saved_s)),
        tuple(
            TensorDifference(*vars(each).values(), *(_short(one.told(each.role, each.tensor)) for one in (ours, other)))
            for each in _told_apart(within)
        ),
    )


@dataclass(frozen=True)
class _Tensor:
    """The fields of a :class:`TensorDifference` that are known before it is told."""

    tensor: str
    role: Role
    ours_s: float
    theirs_s: float

    @property
    def saved_s(self) -> float:
        """How much less the plan takes."""
        return self.theirs_s - self.ours_s


class Roles:
    """What the redistributions of a plan are for."""

    def __init__(self, plan: ShardingPlan) -> None:
        names = [entry.name for entry in plan.parameters]
        self._read = {way(name): name for name in names for way in (str, cast_name, held_name)}
        self._reduced = {way(name): name for name in names for way in (to_reduce_name, reduced_name, summed_name)}

    def of(self, entry: Redistribution) -> tuple[str, Role]:
        """Whose a redistribution is, and in which role: of a parameter that is gathered or whose gradient is reduced;
        or of a tensor of activations.
        """
        if self.gathers(entry):
            return self._read[entry.tensor], "parameters"
        takers = (entry.tensor, *entry.consumers) if entry.phase == "backward" else ()
        known = self._read | self._reduced
        parameter = next((known[name] for name in takers if name in known), None)
        return (entry.tensor, "activations") if parameter is None else (parameter, "parameters")

    def gathers(self, entry: Redistribution) -> bool:
        """Whether what is moved is a parameter, or what the step reads of it."""
        return entry.tensor in self._read


class _Attribution:
    """The times of a plan by part, and within a part by tensor or operator, those of all layers together."""

    def __init__(self, plan: ShardingPlan) -> None:
        self._plan = plan
        self._layouts = {starred(entry.name): entry.layout for entry in reversed(plan.parameters)}
        self._operators = {starred(entry.name): entry for entry in reversed(plan.operators)}
        self._moved: dict[tuple[str, Role], list[tuple[str, Redistribution]]] = defaultdict(list)
        self._roles = Roles(plan)
        for entry in plan.redistributions:
            name, role = self._roles.of(entry)
            self._moved[starred(name), role].append((name, entry))

    @cached_property
    def times(self) -> Mapping[_Part, Mapping[str, float]]:
        """Seconds of a step, by part and tensor."""
        plan, found = self._plan, defaultdict[_Part, dict[str, float]](dict)
        runs: dict[str, list[float]] = defaultdict(list)
        for run in plan.execution:
            runs[starred(run.name)].append(operator_runs(run.name, plan.micro_batches) * run.predicted_ns / 1e9)
        for name, took in runs.items():
            found[block_of(name), "computation"][name] = math.fsum(took)
        for (name, role), moved in self._moved.items():
            found[block_of(name), role][name] = math.fsum(plan.runs(e) * e.predicted_s for _, e in moved)
        sent = [took for (_, role), within in found.items() if role != "computation" for took in within.values()]
        found["", "copies"][""] = max(0.0, plan.communication_s - math.fsum(sent))
        found["", "optimizer"][""] = plan.optimizer_s or 0.0
        return found

    def told(self, role: Role, tensor: str) -> str:
        """What the plan does with a tensor or an operator, as in the first layer that has it."""
        return self._computed(tensor) if role == "computation" else self._sent(role, tensor)

    def _computed(self, tensor: str) -> str:
        entry = self._operators.get(tensor)
        if entry is None:
            return "not computed"
        inputs = ", ".join(map(self._text, entry.inputs))
        results = ", ".join("-" if layout is None else self._text(layout) for layout in entry.outputs)
        return f"{inputs} -> {results}"

    def _sent(self, role: Role, tensor: str) -> str:
        moved = self._moved.get((tensor, role), [])
        sends = [self._sends(entry, role) for name, entry in moved if name == moved[0][0] and entry.collectives]
        said = ", ".join(sends) or "nothing sent"
        return f"{self._text(self._layouts[tensor])}: {said}" if role == "parameters" else said

    def _sends(self, entry: Redistribution, role: Role) -> str:
        kinds = " and ".join(f"{collective.kind} {collective.axis}" for collective in entry.collectives)
        if role == "activations":
            return f"{self._text(entry.path[0])} => {self._text(entry.path[-1])} by {kinds} in the {entry.phase}"
        return f"{kinds} {f'in the {entry.phase}' if self._roles.gathers(entry) else 'of the gradient'}"

    def _text(self, layout: Layout) -> str:
        return format_layout(layout, self._plan.mesh)


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 3] + "..."


def _told_apart(within: Sequence[Sequence[_Tensor]]) -> Sequence[_Tensor]:
    """The tensors of the parts that are worth a line: those that differ most, and what the plan sends most for whether
    they do or not. The largest saving comes first.
    """
    everything = [each for part in within for each in part]
    least_s = LEAST * max((abs(each.saved_s) for each in everything), default=0.0)
    sent = sorted((each for each in everything if each.role != "computation"), key=lambda each: -each.ours_s)
    found = dict.fromkeys(each for each in sent[:MOST_EXPENSIVE] if each.ours_s > 0)
    most = (each for part in within for each in sorted(part, key=_by_difference)[:MOST_OF_PART])
    found |= dict.fromkeys(sorted((each for each in most if abs(each.saved_s) > least_s), key=_by_difference))
    return sorted(list(found)[:MOST_TENSORS], key=lambda each: (-each.saved_s, each.tensor, each.role))


def _by_difference(each: _Tensor) -> float:
    return -abs(each.saved_s)


def _fewer(parts: Iterable[PartDifference]) -> Sequence[PartDifference]:
    """The parts, the largest saving first; small ones, and of too many the least, are put together role by role."""
    found = sorted(parts, key=lambda part: -abs(part.saved_s))
    least_s = LEAST * abs(found[0].saved_s) if found else 0.0
    kept = [part for part in found[:MOST_PARTS] if abs(part.saved_s) > least_s]
    small = found[len(kept) :]
    for role in ROLES:
        times = [(part.ours_s, part.theirs_s) for part in small if part.role == role]
        others = PartDifference(OTHERS, role, *map(math.fsum, zip(*times))) if times else None
        if others is not None and others.saved_s:  # what each of them saves may be nothing together
            kept.append(others)
    return sorted(kept, key=lambda part: (-part.saved_s, part.block, part.role))
