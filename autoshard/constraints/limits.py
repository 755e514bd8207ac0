"""What constraints leave: of the layouts of each tensor, and of the collectives that may move it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from ..capture import CapturedGraph, Ref
from ..layout import Layout, Placement
from ..redistribution import Banned
from .names import is_meant
from .roles import Roles
from .values import CollectiveRule, Exclusion, Pin, PlacementRule, StrategyPin, matches


class Limit(Protocol):
    """What one constraint leaves of the layouts a tensor can have. Limits are values: equal ones leave the same."""

    @property
    def text(self) -> str:
        """The constraint that it comes from, as the user wrote it."""

    @property
    def kind(self) -> str:
        """What an error calls it: ``pin``, ``constraint`` or ``annotation``."""

    def keep(self, layouts: Sequence[Layout]) -> frozenset[Layout]:
        """The layouts that are left of those possible."""


@dataclass(frozen=True)
class Exactly:
    """This layout and no other: what a pin says."""

    layout: Layout
    text: str
    kind: str = "pin"

    def keep(self, layouts: Sequence[Layout]) -> frozenset[Layout]:
        """See :class:`Limit`."""
        return frozenset(layouts) & {self.layout}


@dataclass(frozen=True)
class AnyBut:
    """Any layout but this one: what ``NAME!=LAYOUT`` says."""

    layout: Layout
    text: str
    kind = "constraint"

    def keep(self, layouts: Sequence[Layout]) -> frozenset[Layout]:
        """See :class:`Limit`."""
        return frozenset(layouts) - {self.layout}


@dataclass(frozen=True)
class Taking:
    """The layouts that an operator takes and gives; None is any. The one limit that looks beyond the first result."""

    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]
    text: str
    kind = "pin"

    def keep(self, layouts: Sequence[Layout]) -> frozenset[Layout]:
        """See :class:`Limit`."""
        first = self.outputs[0] if self.outputs else None
        return frozenset(layout for layout in layouts if first in (None, layout))

    def allows(self, inputs: Sequence[Layout], outputs: Sequence[Layout | None]) -> bool:
        """Whether a strategy is of this kind; what the constraint does not mention may be anything."""
        pairs = [*zip(self.inputs, inputs), *zip(self.outputs, outputs)]
        short = len(self.inputs) <= len(inputs) and len(self.outputs) <= len(outputs)
        return short and all(wanted in (None, found) for wanted, found in pairs)


@dataclass(frozen=True)
class TakingCut:
    """An operator that takes the tensors at these positions cut on an axis, if it can take them so at all."""

    axis: int
    positions: tuple[int, ...]
    text: str
    kind = "constraint"

    def keep(self, layouts: Sequence[Layout]) -> frozenset[Layout]:
        """See :class:`Limit`."""
        return frozenset(layouts)

    def allows(self, inputs: Sequence[Layout], outputs: Sequence[Layout | None]) -> bool:
        """Whether a strategy is of this kind."""
        return all(inputs[k][self.axis].kind == "S" for k in self.positions)


@dataclass(frozen=True)
class OnAxis:
    """On one axis one of these placements, or none of them."""

    axis: int
    placements: tuple[Placement, ...]
    allowed: bool
    text: str
    kind = "constraint"

    def keep(self, layouts: Sequence[Layout]) -> frozenset[Layout]:
        """See :class:`Limit`."""
        return frozenset(layout for layout in layouts if matches(layout[self.axis], self.placements) == self.allowed)


@dataclass(frozen=True)
class CutMost:
    """Cut over as many of ``axes`` as can be, on the first dim that the other axes leave free.

    A dim that another axis cuts too is no choice where that axis is the inner one: only the inner cut of a dim can be
    gathered. ``any_dim`` keeps all dims: for views, whose dims are in another order.
    """

    axes: tuple[int, ...]
    any_dim: bool
    text: str
    kind = "constraint"

    def keep(self, layouts: Sequence[Layout]) -> frozenset[Layout]:
        """See :class:`Limit`."""
        possible = sorted((layout for layout in layouts if not self._hidden(layout)), key=self._others)
        kept: set[Layout] = set()
        for _, alike in groupby(possible, key=self._others):
            ranked = sorted(alike, key=self._rank)
            kept.update(layout for layout in ranked if self._rank(layout) == self._rank(ranked[0]))
        return frozenset(kept)

    def _others(self, layout: Layout) -> tuple[Placement, ...]:
        return tuple(p for axis, p in enumerate(layout) if axis not in self.axes)

    def _hidden(self, layout: Layout) -> bool:
        return any(
            layout[axis].kind == "S" and layout.axes_of(layout[axis].dim)[-1] not in self.axes for axis in self.axes
        )

    def _rank(self, layout: Layout) -> tuple[object, ...]:
        whole = sum(layout[axis].kind != "S" for axis in self.axes)
        dims = [] if self.any_dim else [(layout[axis].kind != "S", layout[axis].dim) for axis in self.axes]
        return (whole, dims)


class Limits:
    """The limits of every named layout and the collectives banned for every tensor of one graph."""

    def __init__(self, graph: CapturedGraph, names: Sequence[str]) -> None:
        self.roles = Roles(graph)
        self._graph = graph
        self._names = names
        self._limits: dict[int, list[Limit]] = {}
        self._bans: list[Callable[[Ref], Banned]] = []
        self._rules: list[CollectiveRule] = []
        self._banned: dict[Ref, Banned] = {}
        self._remade: set[Ref] = set()
        self._asked: dict[tuple[Ref, Placement], None] = {}

    def of(self, index: int) -> tuple[Limit, ...]:
        """The limits of the layout with this number, in the order of :func:`~autoshard.constraints.names.names_of`."""
        return tuple(self._limits.get(index, ()))

    def banned(self, ref: Ref) -> Banned:
        """The collectives that may not move a tensor."""
        if not self._rules and not self._bans:
            return frozenset()
        if ref not in self._banned:
            named = ((kind, rule.axis, -1) for rule in self.rules(ref) for kind in rule.kinds)
            self._banned[ref] = frozenset(named).union(*(ban(ref) for ban in self._bans))
        return self._banned[ref]

    def rules(self, ref: Ref) -> tuple[CollectiveRule, ...]:
        """The constraints that forbid collectives for a tensor by its name."""
        if not self._rules:
            return ()
        name, role = self._graph.tensor_name(ref), self.roles.of(ref)
        return tuple(
            rule
            for rule in self._rules
            if rule.tensors in ("tensors", role) and is_meant(name, self._graph, [rule.pattern])
        )

    def remade(self, ref: Ref) -> bool:
        """Whether the backward makes its own copies of a tensor, rather than keep those of the forward."""
        return ref in self._remade

    def limit(self, index: int, limit: Limit) -> None:
        """Adds a limit of the layout with this number."""
        self._limits.setdefault(index, []).append(limit)

    def remake(self, ref: Ref) -> None:
        """Has the backward make its own copies of a tensor."""
        self._remade.add(ref)

    @property
    def asked(self) -> tuple[tuple[Ref, Placement], ...]:
        """Cuts of dims in parts that are to be choices, beside those that the graph asks for."""
        return tuple(self._asked)

    def ask(self, ref: Ref, placement: Placement) -> None:
        """Has a cut of a dim in parts be a choice, there and wherever rules lead from there."""
        self._asked[ref, placement] = None

    def ban(self, banned: Callable[[Ref], Banned]) -> None:
        """Adds collectives that are banned, by tensor."""
        self._bans.append(banned)

    def add(self, constraint: Pin | StrategyPin | Exclusion | PlacementRule | CollectiveRule) -> None:
        """Adds a constraint that names what it applies to."""
        if isinstance(constraint, CollectiveRule):
            self._rules.append(constraint)
            return
        limit = _limit(constraint)
        for index, name in enumerate(self._names):
            if is_meant(name, self._graph, [constraint.pattern]):
                self.limit(index, limit)


def _limit(constraint: Pin | StrategyPin | Exclusion | PlacementRule) -> Limit:
    match constraint:
        case Pin():
            return Exactly(constraint.layout, constraint.text)
        case StrategyPin():
            return Taking(constraint.inputs, constraint.outputs, constraint.text)
        case Exclusion():
            return AnyBut(constraint.layout, constraint.text)
    return OnAxis(constraint.axis, constraint.placements, constraint.allowed, constraint.text)
