"""Which matrices a scheme that cuts layers leaves to the solver, as they have no other to go with.

Under ``tp`` a matrix that is cut by columns goes with one that is cut by rows, and between two such pairs nothing but
sums is sent. What a lone matrix makes, as a projection between stages does, or what it gives back in the backward,
would have to be gathered. People leave it whole. Which these are is looked for where a scheme has no plan on its axis
alone: of the operator up to which there is none the nearest matrix before it is left, until there is one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from cost_models import Profile

from ..capture import CapturedGraph
from ..constraints import CUT_OF_INPUTS, AxisScheme
from ..constraints.layers import layers
from ..constraints.roles import Roles
from ..errors import ConstraintError
from ..mesh import Mesh
from ..ops import is_contraction
from ..plans import ShardingPlan
from ..strategies import Rulebook
from .blocking import first_without_an_answer
from .mixing import offered_under, where_of, without_strategies

MOST_LEFT = 12
"""Matrices of a layer, at most."""
LOOKED_S = 30.0
"""Seconds after which no more is looked for."""


def lone_matrices(
    graph: CapturedGraph, scheme: AxisScheme, mesh: Mesh, profile: Profile, rulebook: Rulebook
) -> tuple[str, ...]:
    """The names of the parameters that a scheme has to leave to the solver, those of numbered layers as one pattern.
    None where it cuts no layers, where nothing stands in its way, and where leaving some does not help.

    Args:
        profile: prices what is sent, and so says what can be.
    """
    if scheme.scheme in CUT_OF_INPUTS or mesh.shape[scheme.axis] == 1:
        return ()
    roles = Roles(graph)

    def blocked(names: list[str]) -> int | None:
        """The first operator that stands in the way where these are left."""
        offered = offered_under(graph, [scheme.having_also(names)], mesh, rulebook)
        if offered is None:
            raise ConstraintError("the scheme makes no sense without them")
        at = next(without_strategies(graph, offered), None)
        return first_without_an_answer(graph, offered, profile) if at is None else at

    left: list[str] = []
    until_s = time.monotonic() + LOOKED_S
    try:
        while (at := blocked(left)) is not None:
            name = next(_nearest(graph, at, roles, (*scheme.leaving, *left)), None)
            if name is None or len(left) == MOST_LEFT or time.monotonic() > until_s:
                return ()
            left.append(name)
        for name in left[:-1]:  # without the last one nothing would do
            fewer = [other for other in left if other != name]
            left = fewer if blocked(fewer) is None else left
    except (TimeoutError, ConstraintError):
        return ()
    return tuple(left)


def said_of_lone(graph: CapturedGraph, given: AxisScheme, leaving: AxisScheme) -> str:
    """What a scheme leaves to the solver beside what was said, and what people do about it."""
    first, *others = (name for name in leaving.leaving if name not in given.leaving)
    parameters = [i for i, node in graph.of_kind("parameter") if fnmatchcase(node.name, first)]
    where = where_of(graph.nodes[next(Roles(graph).readers(frozenset(parameters)))])
    also = f" and {len(others)} more" if others else ""
    return (
        f"{given.text!r} cuts the matrices of layers in pairs, by columns and by rows, but {first}{also}, read by "
        f"{where}, has no other to go with: whether it is cut is left to the solver (people leave it whole). The plan "
        f"says {leaving.text!r}"
    )


def said_of_computed(graph: CapturedGraph, scheme: AxisScheme, plan: ShardingPlan) -> str:
    """Which products a plan under a scheme that cuts layers has whole on every rank, or of whole matrices, as what they
    multiply with is computed of parameters and the scheme does not know which; empty where there are none.
    """
    if scheme.scheme in CUT_OF_INPUTS or plan.mesh.shape[scheme.axis] == 1:
        return ""
    entries = {entry.name: entry for entry in plan.operators if entry.phase == "forward"}
    whole = []
    for i, k in Roles(graph).computed.items():
        node, entry = graph.nodes[i], entries[graph.nodes[i].name]
        taken, made = entry.inputs[k][scheme.axis], entry.outputs[0]
        is_shared = made is not None and made[scheme.axis].kind != "R" and scheme.scheme == "tp"
        if taken.kind == "R" and not is_shared:
            whole.append(node)
    if not whole:
        return ""
    also = f" and {len(whole) - 1} more" if whole[1:] else ""
    return (
        f"{scheme.text!r} cuts the matrices of layers, but the weight of {where_of(whole[0])}{also} is computed of "
        "parameters and has the shape of none: every rank has all of it. Where a product of parameters is added to a "
        "matrix, or one is scaled, masked or divided by lengths, it is cut as that matrix"
    )


def _nearest(graph: CapturedGraph, at: int, roles: Roles, left: tuple[str, ...]) -> Iterator[str]:
    """Of matrices that are not left those that operators before this one read, the nearest first."""
    weights, matrices = roles.weights, roles.matrices - roles.narrow
    found = layers(graph)
    seen, waiting = {at}, deque([at])
    while waiting:
        node = graph.nodes[waiting.popleft()]
        for parameter in [weights[ref.node] for ref in node.inputs if ref.node in weights and is_contraction(node)]:
            name = graph.nodes[parameter].name
            if parameter in matrices and not any(fnmatchcase(name, pattern) for pattern in left):
                yield _of_all_layers(name, found)
        before = [ref.node for ref in node.inputs if ref.node not in seen and ref.node not in weights]
        seen.update(before)
        waiting.extend(before)


def _of_all_layers(name: str, found: Mapping[str, list[int]]) -> str:
    """A name with ``*`` for the numbers of layers: those of layers alike are decided once."""
    parts = name.split(".")
    return ".".join("*" if ".".join(parts[: k + 1]) in found else part for k, part in enumerate(parts))
