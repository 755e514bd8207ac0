"""Translates the layouts in a plan to choices of the integer program, and choices back to layouts."""

from __future__ import annotations

from collections.abc import Sequence

from ..layout import format_strategy
from ..planning import Formulation
from ..plans import ShardingPlan
from ..strategies import Strategy

Decisions = tuple[Strategy | None, ...]
"""For every solver node the layouts that a plan gives it; None for what the plan does not list."""


def decisions_of(plan: ShardingPlan, formulation: Formulation) -> Decisions:
    """A plan's decisions in the order of the solver's nodes. The plan must be for the formulation's graph and mesh."""
    listed = {entry.name: Strategy(entry.inputs, entry.outputs) for entry in plan.operators}
    for entry in (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs):
        listed[entry.name] = Strategy((), (entry.layout,))
    return tuple(listed.get(name) for name in formulation.names)


def choices_of(decisions: Decisions, formulation: Formulation) -> tuple[int | None, ...]:
    """The number of each decision among the strategies of its node; None where it is not offered, or not listed."""
    numbers: dict[int, dict[Strategy, int]] = {}
    found: list[int | None] = []
    for decision, strategies in zip(decisions, formulation.strategies):
        if id(strategies) not in numbers:
            numbers[id(strategies)] = {strategy: k for k, strategy in reversed(list(enumerate(strategies)))}
        found.append(None if decision is None else numbers[id(strategies)].get(decision))
    return tuple(found)


def decisions_made(formulation: Formulation, choices: Sequence[int]) -> Decisions:
    """The strategy that each solver node has under these choices."""
    return tuple(strategies[choice] for strategies, choice in zip(formulation.strategies, choices))


def decision_text(decision: Strategy, formulation: Formulation) -> str:
    """A decision as the plan file writes it: a layout, or those that an operator takes and gives."""
    text = format_strategy(decision.inputs, decision.outputs, formulation.mesh)
    return text if decision.inputs else text.removeprefix("-> ")
