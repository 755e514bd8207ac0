"""Which activations may travel while operators run: by the order of the graph, whatever their layouts.

An activation is early where it is first read, in the layout that it is taken to, behind other operators that take time
(:mod:`autoshard.plans.schedule`). Who reads it first there depends on layouts, so the program knows two things alone:
which tensors have a reader so late, and which have one so soon that its own way is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..capture import CapturedGraph, Node, Ref
from ..plans import PHASES, Phase
from ..recomputation import first_name

TakesTime = Callable[[Node], bool]
"""Whether an operator may take time, under some strategy."""


def late_readers(graph: CapturedGraph, takes_time: TakesTime) -> Iterator[Ref]:
    """Tensors that an operator of the phase which makes them reads behind others that may take time.

    What is computed again comes with the tensor of the forward: a program that decides it has one for both.
    """
    number = {node.name: i for i, node in graph.of_kind("operator")}
    for ref, _, _, is_late in _reads(graph, takes_time):
        if is_late:
            yield ref
            first = first_name(graph.nodes[ref.node].name)
            if first is not None:
                yield Ref(number[first], ref.output)


def at_once(graph: CapturedGraph, takes_time: TakesTime) -> Iterator[tuple[Ref, int, int]]:
    """Tensors whose first reader stands right behind them in every plan, with that and the position at which it takes
    them; none that are computed again, or read by what is, as a plan may do without.
    """
    seen: set[Ref] = set()
    for ref, reader, position, is_late in _reads(graph, takes_time):
        is_again = any(first_name(graph.nodes[i].name) is not None for i in (ref.node, reader))
        if ref not in seen and not is_late and not is_again:
            seen.add(ref)
            yield ref, reader, position


def _reads(graph: CapturedGraph, takes_time: TakesTime) -> Iterator[tuple[Ref, int, int, bool]]:
    """Every tensor with each operator that reads it in the phase in which another one makes it, in order: that, the
    position, and whether others that take time stand between.
    """
    for phase in PHASES:
        yield from _reads_of(graph, phase, takes_time)


def _reads_of(graph: CapturedGraph, phase: Phase, takes_time: TakesTime) -> Iterator[tuple[Ref, int, int, bool]]:
    before: dict[int, int] = {}  # by operator, how many up to it take time
    count = 0
    for i, node in graph.of_kind("operator"):
        if node.phase == phase:
            for position, ref in enumerate(node.inputs):
                if ref.node in before:
                    yield ref, i, position, before[ref.node] < count
            count += takes_time(node)
            before[i] = count
