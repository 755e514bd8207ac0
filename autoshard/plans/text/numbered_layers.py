"""A plan without identical layers written as that of all of them: first with layers numbered without a gap, so that
what is one layer away is so wherever layers are left out; then every choice of layers with those that it stands for.
"""

from __future__ import annotations

from dataclasses import replace

from ..left_out import LeftOut, Where
from ..plan import Redistribution, ShardingPlan
from .execution_order import Block, Loop, Run
from .name_patterns import Pattern, Repeats, Runs, format_pattern, prefixes, runs_of, split_name


def can_be_numbered(plan: ShardingPlan) -> bool:
    """Whether the layers that a plan lacks can be told by their numbers: they are of no list inside another, and
    nothing goes from one side of the gap to the other but between layers that are the same.
    """
    is_plain = all(_is_plain(out.stack.path) for out in plan.left_out)
    return is_plain and not any(_is_far(out, entry) for out in plan.left_out for entry in plan.redistributions)


def _is_plain(path: str) -> bool:
    """Whether files write a path as it is, and it has no number."""
    return format_pattern(split_name(path)[0], {}) == path and not split_name(path)[1]


def _is_far(out: LeftOut, entry: Redistribution) -> bool:
    where = out.stack.where(entry.tensor)
    if where is None:
        return False
    read = filter(None, map(out.stack.where, entry.consumers))
    across = (layer for layer, _ in read if (layer < out.cut) != (where[0] < out.cut))
    return any(abs(out.shifted(layer) - out.shifted(where[0])) > out.reach for layer in across)


class Numbering:
    """The layers of a plan numbered without a gap, and back. Without layers left out, nothing changes."""

    def __init__(self, left_out: tuple[LeftOut, ...]) -> None:
        self._out = {out.stack.path: out for out in left_out}

    def name(self, name: str) -> str:
        """The name with the number of its layer."""
        for out in self._out.values():
            where = out.stack.where(name)
            if where is not None and where[0] >= out.cut:
                return out.stack.name(out.shifted(where[0]), where[1])
        return name

    def moved(self, entry: Redistribution) -> Redistribution:
        """A redistribution in numbers of layers."""
        tensor, consumers = self.name(entry.tensor), tuple(map(self.name, entry.consumers))
        if tensor == entry.tensor and consumers == entry.consumers:
            return entry
        return replace(entry, tensor=tensor, consumers=consumers)

    def filled(self, pattern: Pattern) -> Pattern:
        """The names of the whole plan that a pattern of numbered ones stands for."""
        if not self._out or not pattern.choices:
            return pattern
        first, *others = pattern.choices
        out = self._out.get(prefixes(pattern)[0])
        return pattern if out is None else replace(pattern, choices=(_filled(first, out), *others))

    def repeats(self, repeats: Repeats) -> dict[str, int]:
        """How many layers there are."""
        return {prefix: count + self._missing(prefix) for prefix, count in repeats.items()}

    def _missing(self, prefix: str) -> int:
        return self._out[prefix].count if prefix in self._out else 0

    def execution(self, block: Block) -> Block | None:
        """The execution of the whole plan, from that of the numbered one; None where layers left out are in no loop."""
        found: list[Run | Loop] = []
        for part in block:
            if isinstance(part, Loop):
                out = self._out.get(part.prefix)
                if out is not None:
                    if max(part.first, part.last) < out.cut and any(map(out.copies, part.indices)):
                        return None
                    part = replace(part, first=out.layer(part.first), last=out.layer(part.last))
            else:
                out, where = self._module(part.module)
                if out is not None and out.copies(where[0]):
                    return None
                if out is not None:
                    part = replace(part, module=out.stack.name(out.layer(where[0]), where[1])[:-1])
            found.append(part)
        return tuple(found)

    def _module(self, module: str) -> tuple[LeftOut | None, Where]:
        """The stack of a module, with the number of its layer and its path there."""
        for out in self._out.values():
            where = out.stack.where(f"{module}/")
            if where is not None:
                return out, where
        return None, (0, "")


def _filled(runs: Runs, out: LeftOut) -> Runs:
    layers = {out.layer(number) for run in runs for number in run}
    layers.update(layer for run in runs for number in run for layer in out.copies(number))
    return runs_of(sorted(layers))
