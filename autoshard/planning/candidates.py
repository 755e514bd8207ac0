"""The strategies that the planner chooses from: those that are enumerated, as far as constraints leave them."""

from __future__ import annotations

from collections.abc import Sequence

from ..capture import CapturedGraph
from ..constraints.limits import Limit, Limits, Taking, TakingCut
from ..constraints.names import names_of, results_of
from ..errors import ConstraintError, ContradictionError
from ..layout import Layout, format_layout, format_strategy
from ..mesh import Mesh
from ..strategies import Enumerator, Rulebook, Strategy

MOST_SHOWN = 12
"""Layouts or strategies that an error lists."""


def candidates(
    graph: CapturedGraph, mesh: Mesh, limits: Limits, rulebook: Rulebook | None = None
) -> tuple[tuple[Strategy, ...], ...]:
    """The strategies of every node of a graph, then the layouts of every result that leaves it, under their limits.

    Equal strategies under equal limits are the same tuple, so that prices are worked out once.

    Args:
        rulebook: the rules that are known already; left out, those that were checked in this process.

    Raises:
        ConstraintError: a limit leaves none; the message says what there is, and which other limit stands in the way.
    """
    enumerator = Enumerator(graph, mesh, rulebook or Rulebook.of_process(), limits.asked)
    found = [enumerator.strategies(node) for node in graph.nodes]
    mutated = {ref for _, ref in graph.mutations}
    found += [enumerator.leaving(ref, cut=ref not in mutated) for _, ref in results_of(graph)]
    limited = _Limited(mesh, limits)
    return tuple(limited.of(i, name, offered) for i, (name, offered) in enumerate(zip(names_of(graph), found)))


def what_it_can_have(name: str, strategies: tuple[Strategy, ...], limits: Sequence[Limit], mesh: Mesh) -> str:
    """``up.weight can have dp:R tp:S(1) under the pin 'up.weight=tp:S(1)'``, of what limits leave of it."""
    said = " and ".join(dict.fromkeys(f"the {limit.kind} {limit.text!r}" for limit in limits))
    can = listed([format_layout(each, mesh) for each in _layouts(strategies)])
    return f"{name} can have {can}{said and ' under '}{said}"


def listed(texts: Sequence[str]) -> str:
    """Texts in one line, of many the first."""
    return "; ".join([*texts[:MOST_SHOWN], *[f"and {len(texts) - MOST_SHOWN} more"] * (len(texts) > MOST_SHOWN)])


class _Limited:
    """Applies limits to strategies, each pair of them once."""

    def __init__(self, mesh: Mesh, limits: Limits) -> None:
        self._mesh, self._limits = mesh, limits
        self._limited: dict[object, tuple[Strategy, ...]] = {}

    def of(self, index: int, name: str, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        offered = strategies
        applied: list[Limit] = []
        for limit in self._limits.of(index):
            key = (id(strategies), limit)
            if key not in self._limited:
                self._limited[key] = _kept(limit, strategies)
            if not self._limited[key]:
                raise self._impossible(limit, name, offered, applied)
            strategies = self._limited[key]
            applied.append(limit)
        return strategies

    def _impossible(
        self, limit: Limit, name: str, strategies: tuple[Strategy, ...], applied: list[Limit]
    ) -> ConstraintError:
        """Says what a tensor can have, and which constraint stands in the way where it is not the tensor itself."""
        alone = _kept(limit, strategies)
        if not alone:
            texts = [format_layout(layout, self._mesh) for layout in _layouts(strategies)]
            if isinstance(limit, Taking):
                texts = [format_strategy(s.inputs, s.outputs, self._mesh) for s in strategies]
            possible = listed(texts)
            return ConstraintError(
                f"the {limit.kind} {limit.text!r} cannot hold: on the mesh {self._mesh}, {name} can have {possible}"
            )
        against = [other for other in applied if not _kept(other, alone)][:1] or applied
        others = " and ".join(f"the {other.kind} {other.text!r}" for other in against)
        return ContradictionError(
            f"the {limit.kind} {limit.text!r} contradicts {others}: {name} cannot have a layout that suits both"
        )


def _kept(limit: Limit, strategies: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
    layouts = limit.keep(_layouts(strategies))
    if isinstance(limit, Taking | TakingCut):
        kept = (s for s in strategies if s.outputs[0] is None or s.outputs[0] in layouts)
        allowed = tuple(s for s in kept if limit.allows(s.inputs, s.outputs))
        return strategies if isinstance(limit, TakingCut) and not allowed else allowed
    return tuple(s for s in strategies if s.outputs[0] in layouts)


def _layouts(strategies: tuple[Strategy, ...]) -> tuple[Layout, ...]:
    """The distinct layouts of the first result."""
    return tuple(dict.fromkeys(s.outputs[0] for s in strategies if s.outputs[0] is not None))
