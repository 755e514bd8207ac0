"""Operators that keep the layout of their first input, such as an addition: a plan lists them apart from decisions.

Whether an operator follows is a law on its own entry, so that writing and reading a file agree on it without a graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ...layout import Layout
from ..plan import OperatorEntry
from .name_patterns import Line, Pattern, Runs


def preserves_layout(entry: OperatorEntry) -> bool:
    """Whether an operator keeps the layout of its first input, or takes and gives whole tensors alone.

    It follows if every axis does to each result what it does to the first input (cut, replicate or partial; a view or
    transpose may call the dim otherwise), and the other inputs are like the first or replicated.
    """
    layouts = [layout for layout in (*entry.inputs, *entry.outputs) if layout is not None]
    if not entry.inputs or all(layout.is_replicated for layout in layouts):
        return all(layout.is_replicated for layout in layouts)
    first = _kinds(entry.inputs[0])
    results = {_kinds(layout) for layout in entry.outputs if layout is not None}
    others = {kinds for layout in entry.inputs[1:] for kinds in zip(_kinds(layout), first)}
    return results <= {first} and all(kind in ("R", lead) for kind, lead in others)


def _kinds(layout: Layout) -> tuple[str, ...]:
    return tuple(placement.kind for placement in layout)


def group_layout_preserving(lines: Iterable[Line[OperatorEntry]]) -> list[list[Line[OperatorEntry]]]:
    """Lines of operators that follow, those of one module with one strategy together, in the order of the lines."""
    groups: dict[tuple[tuple[str | None, ...], tuple[Runs, ...], OperatorEntry], list[Line[OperatorEntry]]] = {}
    for line in lines:
        if preserves_layout(line.value):
            groups.setdefault((line.pattern.components, line.pattern.choices, line.value), []).append(line)
    return list(groups.values())


def split_role(pattern: Pattern) -> tuple[Pattern, str]:
    """An operator's name as the pattern of its module and what it is there: ``layers.*.mlp`` and ``mul.1``."""
    return replace(pattern, role=""), pattern.role.removeprefix("/")
