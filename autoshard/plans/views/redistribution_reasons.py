"""Why a redistribution is there, in words, as far as the plan alone tells."""

from __future__ import annotations

from dataclasses import replace

from ...layout import Layout, Placement
from ...mesh import Mesh
from ...micro_batches import is_held, is_summed
from ..plan import Redistribution, ShardingPlan
from ..text.layer_relative import absolute_names, frame_of, written_for
from ..text.name_patterns import Line, Repeats
from .expert_words import AgainstExpert

MOST_NAMED = 3
"""Consumers that a reason names."""


class RedistributionReasons:
    """The reasons of one plan's redistributions."""

    def __init__(self, plan: ShardingPlan, repeats: Repeats) -> None:
        self._mesh, self._repeats = plan.mesh, repeats
        self._parameters = {entry.name for entry in plan.parameters}
        self._against = AgainstExpert(plan)
        self._held = self._parameters | {entry.name for entry in (*plan.buffers, *plan.inputs, *plan.outputs)}

    def of(self, line: Line[Redistribution]) -> str:
        """What changes, and for whom: ``makes it whole along tp for layers.*.wq/mm``; and why that is better than what
        experts do, where the plan was held against theirs.
        """
        changes = changes_in_words(line.value.path[0], line.value.path[-1], self._mesh)
        gains = self._against.of(self._first(line))
        return " and ".join(changes) + self._consumers(line) + (f"; {gains}" if gains else "")

    def _first(self, line: Line[Redistribution]) -> Redistribution:
        """The first of the redistributions that a line stands for, with its names."""
        name = line.pattern.names()[0]
        texts = written_for(line.pattern, line.value.consumers)
        consumers = [found for text in texts for found in absolute_names(text, frame_of(name), self._repeats)]
        return replace(line.value, tensor=name, consumers=tuple(consumers))

    def _consumers(self, line: Line[Redistribution]) -> str:
        texts = written_for(line.pattern, line.value.consumers)
        if not texts:
            return ""
        first = absolute_names(texts[0], frame_of(line.pattern.names()[0]), self._repeats)[0]
        if is_held(first):
            return f", once a step, as {texts[0]} is held over it"
        if first in self._parameters and line.value.phase == "backward":
            once = ", once a step" * is_summed(line.value.tensor)
            return f"{once}, as the gradient of {texts[0]} is held"
        if first in self._held:
            return f", as {texts[0]} is held"
        return " for " + ", ".join(texts[:MOST_NAMED]) + _more(len(texts) - MOST_NAMED)


def what_runs(entry: Redistribution, own: str) -> str:
    """Which steps of a redistribution run for it; ``own`` describes those."""
    if not entry.shared:
        return own
    whose = "kept from the forward" if entry.kept else "shared with another way"
    return whose if len(entry.own) == 1 else f"{entry.shared} of {len(entry.path) - 1} steps {whose}; {own}"


def changes_in_words(before: Layout, after: Layout, mesh: Mesh) -> list[str]:
    """What a redistribution does to a tensor; axes to which it does the same are named together."""
    axes: dict[str, list[str]] = {}
    for axis, old, new in zip(mesh.axes, before, after):
        if old != new:
            axes.setdefault(_change(old, new), []).append(axis)
    return [change.format(" and ".join(names)) for change, names in axes.items()]


def _change(old: Placement, new: Placement) -> str:
    match old.kind, new.kind:
        case "P", "S":
            return f"sums the addends of {{}} and leaves each rank a block of dim {new.dim}"
        case "P", _:
            return "sums the addends of {}" if old.reduce == "sum" else f"takes the {old.reduce} over {{}}"
        case "S", "R":
            return "makes it whole along {}"
        case "S", "S":
            return f"cuts dim {new.dim} instead of {old.dim} along {{}}"
        case _, "S":
            return f"cuts dim {new.dim} along {{}}"
        case _:
            return "makes it addends along {}"


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
