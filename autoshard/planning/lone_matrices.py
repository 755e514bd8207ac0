"""Which matrices a scheme that cuts layers leaves to the solver, as they have no other to go with.

Under ``tp`` a matrix that is cut by columns goes with one that is cut by rows, and between two such pairs nothing but
sums is sent. What a lone matrix makes, as a projection between stages does, or what it gives back in the backward,
would have to be gathered. Which these are is looked for where a scheme has no plan, on its axis alone: from the largest
to the smallest, a matrix is cut if there is a plan that cuts it and leaves all that are smaller, and else is left. So
one is found wherever leaving all but one matrix gives one.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial

from cost_models import Profile
from solver import Status

from ..capture import CapturedGraph, Ref
from ..constraints import CUT_OF_INPUTS, AxisScheme
from ..constraints.layers import layers
from ..constraints.names import is_meant
from ..constraints.roles import Roles
from ..mesh import Mesh
from ..ops import is_contraction
from ..strategies import Rulebook
from .blocking import first_answer
from .mixing import offered_under, where_of, without_strategies
from .pricing import Prices

LOOKED_S = 30.0
"""Seconds after which no more is looked for; what is undecided then is left."""


def lone_matrices(
    graph: CapturedGraph, scheme: AxisScheme, mesh: Mesh, profile: Profile, rulebook: Rulebook
) -> tuple[str, ...]:
    """Patterns for the parameters that a scheme has to leave to the solver, the largest first, those of layers alike as
    one where no other matches it. None where it cuts no layers, where nothing stands in its way, and where leaving some
    does not help.

    Args:
        profile: prices what is sent, and so says what can be.
    """
    if scheme.scheme in CUT_OF_INPUTS or mesh.shape[scheme.axis] == 1:
        return ()
    patterns, until_s = _largest_first(graph, scheme.leaving), time.monotonic() + LOOKED_S
    names = list(patterns)
    prices = Prices(graph, Mesh((mesh.axes[scheme.axis],), (mesh.shape[scheme.axis],)), profile)

    def has_a_plan(cut: Sequence[str], undecided: Sequence[str], count: int) -> bool:
        """Whether one is found in time that cuts these and the first undecided ones, and leaves the others."""
        left = [p for name in names if name not in cut and name not in undecided[:count] for p in patterns[name]]
        offered = offered_under(graph, [scheme.having_also(left)], mesh, rulebook)
        if offered is None or next(without_strategies(graph, offered), None) is not None:
            return False
        with suppress(TimeoutError):
            return first_answer(graph, offered, prices, len(graph.nodes), until_s) in (Status.OPTIMAL, Status.FEASIBLE)
        return False

    cut, undecided = list[str](), names
    while undecided and time.monotonic() < until_s:
        also = longest(len(undecided), partial(has_a_plan, cut, undecided))
        cut += undecided[:also]
        undecided = undecided[also + 1 :]
    return tuple(pattern for name in names if name not in cut for pattern in patterns[name]) if cut else ()


def longest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest number, at most ``most``, for which and for all below which it holds; 0 where it does not for 1. What
    takes time is to ask: once where the first number is too many, as most lone matrices stand one behind the other.
    """
    few = 1
    while few <= most and holds(few):
        few *= 2
    asked = range(few // 2 + 1, min(few, most + 1))
    return few // 2 + bisect_left(asked, True, key=lambda count: not holds(count))


def said_of_lone(graph: CapturedGraph, given: AxisScheme, leaving: AxisScheme) -> str:
    """What a scheme leaves to the solver beside what was said, and why."""
    first, *others = (name for name in leaving.leaving if name not in given.leaving)
    parameters = [i for i, node in graph.of_kind("parameter") if fnmatchcase(node.name, first)]
    where = where_of(graph.nodes[next(Roles(graph).readers(frozenset(parameters)))])
    also = f" and {len(others)} more" if others else ""
    return (
        f"{given.text!r} cuts the matrices of layers in pairs, by columns and by rows, and has no plan that cuts all: "
        f"beside larger ones {first}{also}, read by {where}, has no other to go with, and whether it is cut is left to "
        f"the solver. The plan says {leaving.text!r}"
    )


def _largest_first(graph: CapturedGraph, left: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """The names of the matrices that products of layers read and nobody has left yet, by the elements that they read,
    those of layers alike as one name: also small ones, and halves of low rank, which a scheme does not ask to be cut.
    Each with the patterns that match them, and no other parameter.
    """
    roles, found = Roles(graph), layers(graph)
    sizes: dict[str, int] = defaultdict(int)
    for i, node in graph.of_kind("operator"):
        if node.phase == "backward" or not is_contraction(node) or i not in roles.layered:
            continue
        for parameter in sorted({roles.weights[ref.node] for ref in node.inputs if ref.node in roles.weights}):
            name, shape = graph.nodes[parameter].name, graph.meta(Ref(parameter)).shape
            if len(shape) > 1 and not any(fnmatchcase(name, pattern) for pattern in left):
                sizes[_of_all_layers(name, found)] += math.prod(shape)
    parameters = [node.name for _, node in graph.of_kind("parameter")]

    def patterns(name: str) -> tuple[str, ...]:
        """One, or the names themselves where it matches others: a star stands for several parts of a name, too."""
        matched = tuple(each for each in parameters if is_meant(each, graph, [name]))
        meant = tuple(each for each in parameters if _of_all_layers(each, found) == name)
        return (name,) if meant == matched else meant

    return {name: patterns(name) for name in sorted(sizes, key=lambda name: -sizes[name])}


def _of_all_layers(name: str, found: Mapping[str, list[int]]) -> str:
    """A name with ``*`` for the numbers of layers: those of layers alike are decided once."""
    parts = name.split(".")
    return ".".join("*" if ".".join(parts[: k + 1]) in found else part for k, part in enumerate(parts))
