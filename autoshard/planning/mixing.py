"""Which operators mix the rows, or the places of the sequence, that a scheme cuts, so that what they read is gathered.

What reaches each operator under the scheme is followed on its axis alone, which takes no solver: rules are products
over the axes. (A sequence is cut of what rows a rank has; so there, on the axes that cut the batch, too.) What an
operator takes is looked up for each of its inputs apart, so one may be missed, but none is named that could run as its
inputs lie, other than one that would have rows cut elsewhere than the batch is (:func:`without_strategies`).
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import product

from ..capture import CapturedGraph, Node, Ref
from ..constraints import CUT_OF_INPUTS, CUT_THE_BATCH, AxisScheme
from ..constraints.compile import compile_constraints
from ..constraints.limits import Limits
from ..errors import ConstraintError, StrategyWarning
from ..layout import Layout, Placement
from ..mesh import Mesh
from ..plans.natural_order import starred
from ..redistribution import Banned
from ..redistribution.steps import step_on
from ..strategies import Rulebook, Strategy
from .candidates import candidates

MOST_KEPT = 1 << 12
"""Tensors in some layouts of which it is kept what is made of them."""

_NUMBER = re.compile(r"\.[0-9]+$")
"""At the end of the name of an operator that is not the first of its kind in its module."""


@dataclass(frozen=True, eq=False)
class Offered:
    """What schemes leave on their axes alone, a mesh of its own: ``strategies`` are those of every operator there."""

    mesh: Mesh
    limits: Limits
    strategies: tuple[tuple[Strategy, ...], ...]


def offered_under(
    graph: CapturedGraph, schemes: Sequence[AxisScheme], mesh: Mesh, rulebook: Rulebook
) -> Offered | None:
    """What schemes leave on their axes of a mesh; None where that is not known: an annotation in the model names other
    axes, too, one of the schemes makes no sense without the others, or one axis has two.
    """
    schemes = sorted(schemes, key=lambda scheme: scheme.axis)
    axes = [scheme.axis for scheme in schemes]
    if len(set(axes)) < len(axes):
        return None
    part = Mesh(tuple(mesh.axes[axis] for axis in axes), tuple(mesh.shape[axis] for axis in axes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrategyWarning)
        try:
            limits = compile_constraints([replace(scheme, axis=k) for k, scheme in enumerate(schemes)], graph, part)
            return Offered(part, limits, candidates(graph, part, limits, rulebook))
        except ConstraintError:
            return None


def mixers(
    graph: CapturedGraph, scheme: AxisScheme, others: Sequence[AxisScheme], mesh: Mesh, rulebook: Rulebook
) -> tuple[str, ...]:
    """The names of operators that mix what a scheme cuts of every input, rows of the batch or places of the sequence;
    those of layers that are built alike as one pattern. None where it cuts neither, or where ranks have not as many
    each.

    Args:
        others: of the schemes beside it those that say how many rows a rank has, of which a sequence is cut.
    """
    ranks = mesh.shape[scheme.axis]
    if scheme.scheme not in CUT_OF_INPUTS or ranks == 1:
        return ()
    offered = offered_under(graph, [scheme, *others], mesh, rulebook)
    if offered is None or (offered.limits.roles.sequence if scheme.scheme == "cp" else graph.batch) % ranks:
        return ()
    axis = offered.mesh.index(mesh.axes[scheme.axis])
    in_place = scheme.scheme in CUT_THE_BATCH
    return tuple(_patterns(graph.nodes[i] for i in without_strategies(graph, offered, axis, in_place)))


def said_of_mixers(graph: CapturedGraph, given: AxisScheme, gathering: AxisScheme) -> str:
    """What a scheme gathers beside what was said, and what people do about it."""
    first, *others = (name for name in gathering.gathering if name not in given.gathering)
    where = next(where_of(node) for _, node in graph.of_kind("operator") if fnmatchcase(node.name, first))
    also = f" and {len(others)} more" if others else ""
    cut, rows, hint = CUT_OF_INPUTS[given.scheme], graph.batch, ""
    people = "people give targets that are shifted already"
    if given.scheme in CUT_THE_BATCH:
        people = "people gather the rows of all ranks by hand"
        if not graph.batch_dim and graph.first_shape[1:2] == (rows,):
            hint = f". Where the batch is dim 1, which is as long ({rows}), plan for another number of steps"
    return (
        f"{given.text!r} cuts {cut}, but {where}{also} mixes it, or has no rule by which it is cut: what it reads is "
        f"gathered, and what it makes is cut again ({people}). The plan says {gathering.text!r}{hint}"
    )


def where_of(node: Node) -> str:
    """An operator's name, and the line of the model that calls it."""
    return f"{node.name} ({node.source})" if node.source else node.name


def without_strategies(
    graph: CapturedGraph, offered: Offered, axis: int = 0, rows_in_place: bool = False
) -> Iterator[int]:
    """Operators that can run on nothing that earlier operators make and the schemes let be sent, in order. What follows
    them is looked at as if all that they read and make could be sent over an axis.

    Args:
        rows_in_place: also those of the forward behind them that would run on rows alone which are not where the batch
            is: a matrix of all rows against all, of which something is taken for each column.
    """
    possible: dict[Ref, frozenset[Layout]] = {}
    behind = set[int]()
    limits, in_parts = offered.limits, _wanted_in_parts(graph, offered)
    known: dict[object, list[Strategy]] = {}

    def fitting_on(index: int, read: tuple[frozenset[Layout], ...]) -> list[Strategy]:
        """The strategies that take what can reach an operator; equal operators have one tuple of strategies."""
        strategies = offered.strategies[index]
        key = id(strategies), read
        if key not in known:
            pairs = ((each, zip(each.inputs, read)) for each in strategies)
            known[key] = [each for each, taken in pairs if all(layout in layouts for layout, layouts in taken)]
        return known[key]

    def opened(ref: Ref) -> frozenset[Layout]:
        if limits.roles.of(ref) == "parameters":
            return possible[ref]
        return _sent(possible[ref], graph.meta(ref).shape, in_parts[ref], without(ref))

    def without(ref: Ref) -> Banned:
        return frozenset(move for move in limits.banned(ref) if move[1] != axis)

    def misplaced(index: int, fitting: list[Strategy]) -> bool:
        """Whether an operator makes rows that are cut elsewhere, where what stands behind a mixer has them in place."""
        node = graph.nodes[index]
        meta = node.outputs[0] if node.outputs and node.phase == "forward" else None
        dim = None if meta is None else graph.batch_dim_of(meta.shape)
        if dim is None:
            return False
        rows = Placement("S", dim)
        if any(made[axis].kind != "S" or made[axis] == rows for each in fitting if (made := each.outputs[0])):
            return False
        return any(
            ref.node in behind and layout[axis] == rows and layout in possible[ref]
            for strategy in offered.strategies[index]
            if (made := strategy.outputs[0]) and made[axis] == rows
            for ref, layout in zip(node.inputs, strategy.inputs)
        )

    for i, node in enumerate(graph.nodes):
        fitting = fitting_on(i, tuple([possible[ref] for ref in node.inputs]))
        mixes = not fitting or (rows_in_place and misplaced(i, fitting))
        if mixes or any(ref.node in behind for ref in node.inputs):
            behind.add(i)
        if mixes:
            yield i
            fitting = fitting_on(i, tuple([opened(ref) for ref in node.inputs]))
        if not fitting:
            return  # nor on anything else: the schemes themselves say how it is to run
        for k, meta in enumerate(node.outputs):
            ref = Ref(i, k)
            if meta is not None:
                made = frozenset(layout for strategy in fitting if (layout := strategy.outputs[k]) is not None)
                possible[ref] = _sent(made, meta.shape, in_parts[ref], without(ref) if mixes else limits.banned(ref))


def _wanted_in_parts(graph: CapturedGraph, offered: Offered) -> dict[Ref, frozenset[Placement]]:
    """The cuts in parts in which tensors are wanted by who reads them."""
    found: dict[Ref, frozenset[Placement]] = defaultdict(frozenset)
    taken: dict[int, list[frozenset[Placement]]] = {}
    for node, strategies in zip(graph.nodes, offered.strategies):
        if id(strategies) not in taken:  # equal operators have the same tuple
            layouts = zip(*(strategy.inputs for strategy in strategies))
            taken[id(strategies)] = [
                frozenset(p for layout in set(each) for p in layout if p.parts) for each in layouts
            ]
        for ref, placements in zip(node.inputs, taken[id(strategies)]):
            found[ref] |= placements
    return found


@lru_cache(MOST_KEPT)
def _sent(
    made: frozenset[Layout], shape: tuple[int, ...], in_parts: frozenset[Placement], banned: Banned
) -> frozenset[Layout]:
    """What collectives and slices that are not banned make of a tensor in these layouts, one after the other: a
    parameter that is cut along dim 0 is gathered, and cut along dim 1.
    """
    found, waiting = set(made), list(made)
    wanted = [Placement("R"), *(Placement("S", dim) for dim in range(len(shape))), *in_parts]
    while waiting:
        before = waiting.pop()
        for axis, placement in product(range(len(before)), wanted):
            after = before.replace(axis, placement)
            step = step_on(before, after, (axis,))
            moves = () if step is None else ((step.kind, axis, dim) for dim in (-1, step.source))
            if after not in found and step is not None and banned.isdisjoint(moves):
                found.add(after)
                waiting.append(after)
    return frozenset(found)


def _patterns(nodes: Iterable[Node]) -> Iterator[str]:
    """The names of operators; those of layers that are built alike as one pattern, and those that only a number tells
    apart (``/index``, ``/index.1``) as two.
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        alike[_NUMBER.sub("", starred(node.name))].append(node.name)
    for plain, names in alike.items():
        if len(names) == 1:
            yield names[0]
            continue
        bare = {bool(_NUMBER.search(name)) for name in names}
        yield from (plain + ".*" * is_numbered for is_numbered in sorted(bare))
