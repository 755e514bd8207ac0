"""Why does a tensor have this placement? Solves the problem again with another one, and compares the two plans."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from torch import nn

from ..constraints import Constraints, Pin, gather_constraints, nearest_name
from ..constraints.names import is_meant
from ..errors import BudgetError, ConstraintError, InfeasibleError, LayoutError
from ..layout import Layout, check_fits, format_layout, has_empty_shard, is_even
from ..planning import Planner
from ..planning.candidates import MOST_SHOWN
from ..plans import ShardingPlan
from ..strategies import Enumerator
from .decisions import Decisions, decisions_made, decisions_of
from .session import (
    Conditions,
    Priced,
    best_plan,
    check_model,
    constraints_of,
    planner_of,
    priced,
    reporter,
    with_known_memory,
)


@dataclass(frozen=True)
class Explanation:
    """A question about a placement, and its answer.

    Attributes:
        why: the pattern that was asked about; it names ``names``.
        present: the distinct layouts that they have in the plan.
        asked: the layout that was asked about, None for any other than the present.
        found: the distinct layouts that they have in the alternative.
        repriced: whether the prices are of another profile than the plan was made with.
        plan: the plan, as it is priced now.
        alternative: the best plan with the other placement, of several the one that differs least; None for none.
        reason: why there is none.
        order: every tensor that can be redistributed, in the order of the step.
    """

    why: str
    names: tuple[str, ...]
    present: tuple[str, ...]
    asked: str | None
    found: tuple[str, ...]
    repriced: bool
    plan: ShardingPlan
    alternative: ShardingPlan | None
    reason: str
    order: tuple[str, ...]


def explain(
    plan: ShardingPlan,
    model: nn.Module,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    why: str,
    instead: str | None = None,
    **conditions: Unpack[Conditions],
) -> Explanation:
    """Solves the plan's problem once more with another placement.

    Args:
        model, args, kwargs: as for :func:`autoshard.plan`; the model that the plan was made for.
        why: the name of a parameter, input, operator or output, or a glob pattern for several.
        instead: the layout to have instead (a partition spec, or the layouts that an operator takes and gives, too); by
            default any other than the present.
        conditions: mesh, hardware, backend, time_limit_s and progress, as in
            :class:`~autoshard.review.session.Conditions`.

    Raises:
        ConstraintError: ``why`` names nothing, or what is asked about is what the plan does.
        PlanMismatchError: the plan is for another model.
        LayoutError: ``instead`` cannot be read.
    """
    report = reporter(conditions)
    planner = planner_of(plan, model, args, kwargs, **conditions)
    check_model(plan, planner)
    report("pricing the plan again")
    constraints = constraints_of(plan)
    now = priced(plan, planner, planner.formulate(constraints))
    question = _Question(planner, now, why, instead)
    report("solving what would be otherwise")
    return question.answer(constraints, plan)


class _Question:
    """What was asked: the solver nodes that the pattern names, their layouts in the plan, and the layout wanted
    instead.
    """

    def __init__(self, planner: Planner, now: Priced, why: str, instead: str | None) -> None:
        self._planner, self._now, self._why = planner, now, why
        self._instead = None if instead is None else " ".join(instead.split())
        known = now.formulation.names
        self._nodes = [i for i, name in enumerate(known) if name and is_meant(name, planner.graph, [why])]
        if not self._nodes:
            listed = [each for name in known if name for each in planner.graph.called(name)]
            raise ConstraintError(f"{why!r} names no parameter, input, operator or output{nearest_name(why, listed)}")
        self._names = tuple(known[i] for i in self._nodes)
        self._present = self._layouts(decisions_made(now.formulation, now.choices))

    def answer(self, constraints: Constraints, plan: ShardingPlan) -> Explanation:
        """Solves the problem with the other placement and puts the answer together; where there is no such plan, why
        not.
        """
        alternative, reason = None, ""
        found: tuple[str, ...] = ()
        asked = gather_constraints(self._texts(), self._planner.mesh)
        try:
            alternative = best_plan(self._planner, _both(constraints, asked), self._now.decisions)
            found = self._distinct(self._layouts(decisions_of(alternative, self._now.formulation)))
        except (ConstraintError, InfeasibleError, BudgetError) as error:
            reason = self._reason(asked, error)
        return Explanation(
            why=self._why,
            names=self._names,
            present=self._distinct(self._present),
            asked=self._instead,
            found=found,
            repriced=self._planner.profile.fingerprint != plan.hardware_fingerprint,
            plan=with_known_memory(self._planner, self._now.plan, plan),
            alternative=alternative,
            reason=reason,
            order=tuple(node.name for node in self._planner.graph.nodes),
        )

    def _layouts(self, decisions: Decisions) -> list[Layout | None]:
        listed = (decisions[i] for i in self._nodes)
        return [None if decision is None else decision.outputs[0] for decision in listed]

    def _distinct(self, layouts: Sequence[Layout | None]) -> tuple[str, ...]:
        mesh = self._planner.mesh
        return tuple(dict.fromkeys("-" if layout is None else format_layout(layout, mesh) for layout in layouts))

    def _texts(self) -> list[str]:
        """The constraints that make the placement another one: a pin to the layout asked for, or ``NAME!=LAYOUT``."""
        if self._instead is not None:
            pin = gather_constraints(f"{self._why}={self._instead}", self._planner.mesh).values[0]
            if isinstance(pin, Pin) and all(layout == pin.layout for layout in self._present):
                raise ConstraintError(f"{self._why} is {self._instead} in the plan; ask about another layout")
            return [pin.text]
        mesh, present = self._planner.mesh, dict.fromkeys(self._present)
        if len(present) == 1 and None not in present:
            return [f"{self._why}!={format_layout(layout, mesh)}" for layout in present if layout is not None]
        pairs = zip(self._names, self._present)
        return [f"{glob.escape(name)}!={format_layout(layout, mesh)}" for name, layout in pairs if layout is not None]

    def _reason(self, asked: Constraints, error: Exception) -> str:
        """Why there is no such plan: that the layout does not suit the tensor's shape, else what formulation or solver
        say.
        """
        wanted = asked.values[0]
        if isinstance(wanted, Pin):
            for node, name in zip(self._nodes, self._names):
                said = self._unfit(node, name, wanted.layout)
                if said:
                    return said
        return str(error)

    def _unfit(self, node: int, name: str, layout: Layout) -> str:
        shape, mesh, text = self._shape(node), self._planner.mesh, format_layout(layout, self._planner.mesh)
        try:
            check_fits(layout, shape, mesh)
        except LayoutError as error:
            return f"{name}: {error}"
        if has_empty_shard(shape, layout, mesh):
            return f"{name} has the shape {list(shape)}: cut as {text}, some rank would hold nothing of it"
        graph = self._planner.graph
        held = node >= len(graph.nodes) or graph.nodes[node].kind != "operator"
        twice = any(len(layout.axes_of(dim)) > 1 for dim in range(len(shape)))
        if not held:
            enumerator = Enumerator(graph, mesh, self._planner.rulebook, self._now.formulation.asked)
            strategies = enumerator.strategies(graph.nodes[node])
            offered = dict.fromkeys(s.outputs[0] for s in strategies if s.outputs[0] is not None)
            if layout not in offered:
                listed = "; ".join(format_layout(other, mesh) for other in list(offered)[:MOST_SHOWN])
                return f"no rule of {graph.nodes[node].op} gives {name} the layout {text}; it can have {listed}"
        if held and twice and not is_even(shape, layout, mesh):
            return (
                f"{name} has the shape {list(shape)}: {text} cuts a dim over two axes unevenly, which what enters or "
                "leaves the step cannot have"
            )
        return ""

    def _shape(self, node: int) -> tuple[int, ...]:
        formulation, graph = self._now.formulation, self._planner.graph
        if node >= len(graph.nodes):
            return graph.meta(formulation.results[node - len(graph.nodes)][1]).shape
        meta = graph.nodes[node].outputs[0]
        return () if meta is None else meta.shape


def _both(first: Constraints, second: Constraints) -> Constraints:
    return Constraints((*first.values, *second.values), {**first.places, **second.places})
