"""Which operators of the forward the backward computes again under constraints, and of which the planner decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from ..capture import CapturedGraph, can_be_again, inner, recomputable, recomputed
from ..errors import ConstraintError
from .recomputations import recomputation_of, with_views
from .values import Constraint, Recomputation, Recompute, nearest_name


def again_under(constraints: Sequence[Constraint], graph: CapturedGraph) -> frozenset[str]:
    """The operators that are computed again under constraints, by name: those that are in the graph already, with what
    ``recompute``, ``checkpoint`` and ``recomputation`` name, without what ``keep`` names. With an operator that is
    computed again go the views of what it makes, which would share the memory of the first one else.

    Raises:
        ConstraintError: a constraint names nothing that can be computed again, or nothing that the backward reads.
    """
    again, kept = set(graph.again), set[str]()
    for constraint in constraints:
        if isinstance(constraint, Recomputation):
            again |= recomputation_of(constraint, graph)
        elif isinstance(constraint, Recompute):
            (kept if constraint.verb == "keep" else again).update(_named(constraint, graph))
    return frozenset(again - kept)


def may_be_again(constraints: Sequence[Constraint], graph: CapturedGraph) -> frozenset[str]:
    """The operators of which the planner decides: those that it may compute again, without what ``keep`` names."""
    kept = [each for each in constraints if isinstance(each, Recompute) and each.verb == "keep"]
    return recomputable(graph).difference(*(_named(constraint, graph) for constraint in kept))


def _named(constraint: Recompute, graph: CapturedGraph) -> set[str]:
    pattern = constraint.pattern
    possible = [node.name for node in graph.nodes if can_be_again(node)]
    if constraint.verb == "checkpoint":
        modules = ((i, _outermost(node.name, pattern)) for i, node in graph.of_kind("operator"))
        regions = {i: module for i, module in modules if module is not None}
        known = sorted({module for name in possible for module in _modules(name)})
        found = set(inner(graph, regions))
        what = "no module whose operators"
    else:
        known, what = possible, "no operator of the forward that"
        found = {name for name in possible if fnmatchcase(name, pattern)}
        if constraint.verb == "recompute":
            found = set(with_views(found, graph))
    if not found:
        raise ConstraintError(
            f"the constraint {constraint.text!r} names {what} can be computed again (random ones are always kept)"
            + nearest_name(pattern, known)
        )
    if constraint.verb != "keep" and not recomputed(graph, found).again:
        raise ConstraintError(
            f"the constraint {constraint.text!r} would change nothing: the backward reads nothing of what it names "
            f"({', '.join(sorted(found)[:3])}{', ...' * (len(found) > 3)}); leave it out"
        )
    return found


def _outermost(name: str, pattern: str) -> str | None:
    """The outermost module of an operator that a pattern matches."""
    return next((module for module in _modules(name) if fnmatchcase(module, pattern)), None)


def _modules(name: str) -> Iterable[str]:
    """The modules that an operator stands in: ``layers`` and ``layers.0`` for ``layers.0/mul``."""
    parts = name.partition("/")[0].split(".")
    return (".".join(parts[: k + 1]) for k in range(len(parts)))
