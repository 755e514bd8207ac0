"""Which axis does what to the tensors of every module: parameters, forward and backward side by side, layer by layer.

Layers whose tensors lie alike stand in one row; where some differ, a module has a row for each group of layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, zip_longest

from ...layout import Layout, format_layout
from ..natural_order import natural_key, starred
from ..plan import ShardingPlan
from ..text.folded_plan import FoldedPlan
from ..text.layout_preserving import preserves_layout
from ..text.name_patterns import Pattern, format_pattern, prefix_of

COLUMNS = ("parameter", "forward", "backward")
_MOST_TONES = 4


@dataclass(frozen=True)
class Placed:
    """A tensor on the map: its name in its module, its layout as text, and its placement on each axis."""

    name: str
    layout: str
    placements: tuple[str, ...]


@dataclass(frozen=True)
class MapRow:
    """A row of a module: a parameter, a result of the forward and one of the backward, each None where there is none.

    ``layers`` names those that the row is for, ``0-19``; empty where it is for all. The row is the ``first`` of its
    module, or the one that ``starts`` what is for these layers.
    """

    module: str
    layers: str
    cells: tuple[Placed | None, ...]
    first: bool
    starts: bool


@dataclass(frozen=True)
class LayerMap:
    """The tensors of one stack of layers, or (``stack`` is empty) those outside of all layers."""

    stack: str
    count: int
    rows: tuple[MapRow, ...]


def tone(placement: str) -> str:
    """The class that colours a placement: one for each dim that is cut, the last for all others; ``R`` and ``P``."""
    if not placement.startswith("S"):
        return f"is{placement[0]}"
    return f"isS{min(int(placement[2:-1]), _MOST_TONES - 1)}"


def layer_maps(plan: ShardingPlan, folded: FoldedPlan) -> list[LayerMap]:
    """A map for each stack of layers, and one for the tensors outside of them, which comes last."""
    # what each module of each layer holds: stack -> module -> layer -> one list for each column
    stacks: dict[str, dict[str, dict[int, list[list[Placed]]]]] = defaultdict(lambda: defaultdict(dict))
    for column, pattern, layout in _mapped(folded):
        stack, module, name = _split(pattern, folded)
        placed = Placed(name, format_layout(layout, plan.mesh), tuple(map(str, layout)))
        for layer in chain(*pattern.choices[0]) if stack else (0,):
            stacks[stack][module].setdefault(layer, [[] for _ in COLUMNS])[column].append(placed)
    order = _order(plan)
    maps = [_layer_map(stack, modules, order) for stack, modules in stacks.items()]
    return sorted(maps, key=lambda each: not each.stack)


def _mapped(folded: FoldedPlan) -> Iterator[tuple[int, Pattern, Layout]]:
    """Parameters, and the first results of the operators that decide something, with their columns."""
    for line in folded.parameters:
        yield 0, line.pattern, line.value.layout
    for column, lines in enumerate((folded.forward, folded.backward), start=1):
        for operator in lines:
            layout = operator.value.outputs[0] if operator.value.outputs else None
            if layout is not None and not preserves_layout(operator.value):
                yield column, operator.pattern, layout


def _split(pattern: Pattern, folded: FoldedPlan) -> tuple[str, str, str]:
    """The stack that a pattern's first index belongs to, the module inside a layer, and the tensor's name in it."""
    written = format_pattern(pattern, folded.repeats)
    path, slash, role = written.partition("/")
    if not slash:
        path, _, role = written.rpartition(".")
    if not pattern.choices:
        return "", path, role
    at = pattern.components.index(None)
    return prefix_of(pattern.components[:at]), ".".join(path.split(".")[at + 1 :]), role


def _order(plan: ShardingPlan) -> dict[str, int]:
    """The place of each module in the order of execution."""
    paths = dict.fromkeys(starred(entry.name.partition("/")[0]) for entry in plan.execution)
    return {path: place for place, path in enumerate(paths)}


def _layer_map(stack: str, modules: dict[str, dict[int, list[list[Placed]]]], order: dict[str, int]) -> LayerMap:
    def place(module: str) -> tuple[int, object]:
        path = ".".join(filter(None, (stack, "*" if stack else "", module)))
        return order.get(path, len(order)), natural_key(module)

    rows: list[MapRow] = []
    layers = {layer for of_layers in modules.values() for layer in of_layers}
    for module in sorted(modules, key=place):
        groups: dict[str, list[int]] = defaultdict(list)
        held = modules[module]
        for layer in sorted(held):
            groups[repr(held[layer])].append(layer)
        for alike in groups.values():
            named = "" if len(groups) == 1 and set(alike) == layers else _ranges(alike)
            for k, cells in enumerate(zip_longest(*held[alike[0]])):
                rows.append(MapRow(module, named, cells, first=not k and alike[0] == min(held), starts=not k))
    return LayerMap(stack, len(layers), tuple(rows))


def _ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
