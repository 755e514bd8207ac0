"""What a plan gains over the best plan of experts, in words: what earns it, and why a redistribution is worth it."""

from __future__ import annotations

import math

from ..expert_attribution import Roles
from ..expert_distance import OTHERS, ExpertDistance, PartDifference, Role, block_of
from ..plan import Redistribution, ShardingPlan
from ..units import format_seconds

EARNING = 3
"""How many of the differences that earn a distance are named."""

_WORDS: dict[Role, str] = {
    "computation": "computation",
    "parameters": "what is sent for parameters and their gradients",
    "activations": "what is sent of activations",
    "copies": "copies inside a rank",
    "optimizer": "the optimizer's step",
}


def expert_lines(plan: ShardingPlan) -> tuple[str, ...]:
    """How far a plan is from the best one of experts, the differences that earn most of it, and what all others come
    to: the last lines add up to the first. Nothing for a plan that was not held against experts.
    """
    against = plan.against
    if against is None:
        return ()
    earning = against.earning(EARNING)
    lines = [head_line(plan, against)]
    lines += [f"  {signed(part.saved_s)}: {part_words(part, against.expert)}{_most(part, against)}" for part in earning]
    if earning:
        lines.append(f"  {signed(rest_s(plan, against))}: all other differences together")
    return tuple(lines)


def head_line(plan: ShardingPlan, against: ExpertDistance) -> str:
    """``against the best expert, ddp+sp, 457.7 ms: 26.37 ms less (5.8%)``; and what both cost, where the objective is
    not to add up all that runs.
    """
    saved_s = against.step_s - plan.step_s
    said = f"against the best plan of experts, {against.expert}, {format_seconds(against.step_s)}"
    if not against.parts and not saved_s:
        return f"{said}: the same"
    here, there = (format_seconds(cost_ns / 1e9) for cost_ns in (plan.solver.cost_ns, against.cost_ns))
    costs = "" if plan.objective == "step-time" else f"; by the objective {plan.objective} {here}, there {there}"
    return f"{said}: {signed(saved_s)} ({abs(saved_s) / against.step_s:.1%}){costs}"


def rest_s(plan: ShardingPlan, against: ExpertDistance) -> float:
    """What the plan saves beside the differences that are named."""
    return math.fsum((against.step_s, -plan.step_s, *(-part.saved_s for part in against.earning(EARNING))))


def part_name(part: PartDifference) -> str:
    """``what is sent of activations in layers.*``."""
    where = {"": "", OTHERS: ", small differences"}.get(part.block, f" in {part.block}")
    return f"{_WORDS[part.role]}{where}"


def part_words(part: PartDifference, expert: str) -> str:
    """``what is sent of activations in layers.*, 103.9 ms where ddp+sp takes 120.4 ms``."""
    return f"{part_name(part)}, {format_seconds(part.ours_s)} where {expert} takes {format_seconds(part.theirs_s)}"


def signed(seconds: float) -> str:
    """``12.3 ms less``."""
    return f"{format_seconds(abs(seconds))} {'less' if seconds >= 0 else 'more'}"


class AgainstExpert:
    """What the redistributions of a plan gain over what the best plan of experts does with their tensors."""

    def __init__(self, plan: ShardingPlan) -> None:
        self._against, self._roles = plan.against, Roles(plan)

    def of(self, entry: Redistribution) -> str:
        """For example ``1.4 ms more than with ddp+sp: there nothing sent; earned by the optimizer's step, 7.6 ms where
        ddp+sp takes 19.9 ms``; empty where nothing is known, or nothing sent.
        """
        if self._against is None or not entry.collectives:
            return ""
        name, role = self._roles.of(entry)
        found = self._against.tensor(name, role)
        if found is None:
            return ""
        expert = self._against.expert
        if not found.saved_s:
            same = found.ours == found.theirs
            return f"as {expert} does" if same else f"which takes as long with {expert}: there {found.theirs}"
        if role == "parameters":
            said = f"all that is sent for it takes {signed(found.saved_s)} than with {expert}, which has {found.theirs}"
        else:
            said = f"{signed(found.saved_s)} than with {expert}: there {found.theirs}"
        return said if found.saved_s > 0 else said + self._earned(name, role)

    def _earned(self, name: str, role: Role) -> str:
        """What is the better for it: other tensors of the part, for parameters the optimizer, else what saves most."""
        assert self._against is not None
        first = self._against.part("", "optimizer") if role == "parameters" else None
        ways = (self._against.part(block_of(name), role), first, *self._against.earning(1))
        earned = next((part for part in ways if part is not None and part.saved_s > 0), None)
        return "" if earned is None else f"; earned by {part_words(earned, self._against.expert)}"


def _most(part: PartDifference, against: ExpertDistance) -> str:
    """The tensor of the part that saves most, and what becomes of it."""
    tensors = against.within(part)
    if not tensors or tensors[0].saved_s <= 0:
        return ""
    first = tensors[0]
    return f"; most at {first.tensor}: {first.ours}; there {first.theirs}"
