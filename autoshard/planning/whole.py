"""What every rank computes in whole under a scheme that cuts layers, though it could be shared: said as a warning, as
such a plan is right and proved, and slower than people think.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from cost_models import Profile
from solver import Status

from ..capture import CapturedGraph, Node, Ref
from ..constraints import CUT_OF_INPUTS, AxisScheme
from ..constraints.roles import Roles
from ..layout import Layout, S
from ..ops import is_contraction
from ..plans import OperatorEntry, ShardingPlan
from ..plans.natural_order import starred
from ..strategies import Rulebook
from .blocking import first_answer
from .mixing import Offered, offered_under, where_of
from .pricing import Prices

LOOKED_S = 10.0
"""Seconds for whether one attention can be cut."""


def said_of_whole(
    graph: CapturedGraph, scheme: AxisScheme, plan: ShardingPlan, profile: Profile, rulebook: Rulebook
) -> str:
    """Which products of a layer, and which attention of several heads, a plan has whole on every rank of the axis of a
    scheme, where no plan has it cut; empty where there are none, or the scheme cuts inputs.

    Args:
        profile: prices what is sent, and so says what can be.
    """
    if scheme.scheme in CUT_OF_INPUTS or plan.mesh.shape[scheme.axis] == 1:
        return ""
    roles, entries = Roles(graph), {entry.name: entry for entry in plan.operators if entry.phase == "forward"}
    if said := _said_of_computed(graph, roles, scheme, entries):
        return said
    whole = list(_whole_attention(graph, roles, entries, scheme.axis, plan.mesh.shape[scheme.axis]))
    offered = offered_under(graph, [scheme], plan.mesh, rulebook) if whole else None
    if offered is None:
        return ""
    prices = Prices(graph, offered.mesh, profile)
    found = [i for i in whole if not _can_be_cut(graph, i, offered, prices)]
    if not found:
        return ""
    return (
        f"{scheme.text!r} cuts attention by heads, but every rank computes all of "
        f"{_first_of([graph.nodes[i] for i in found])}: something between it and the projections does not keep the "
        "heads as a dim of their own, or has no rule that cuts them"
    )


def _said_of_computed(graph: CapturedGraph, roles: Roles, scheme: AxisScheme, entries: dict[str, OperatorEntry]) -> str:
    """Products whose matrices are computed of parameters, and the scheme does not know of which."""
    whole = []
    for i, k in roles.computed.items():
        node, entry = graph.nodes[i], entries[graph.nodes[i].name]
        taken, made = entry.inputs[k][scheme.axis], entry.outputs[0]
        is_shared = made is not None and made[scheme.axis].kind != "R" and scheme.scheme == "tp"
        if taken.kind == "R" and not is_shared:
            whole.append(node)
    if not whole:
        return ""
    return (
        f"{scheme.text!r} cuts the matrices of layers, but the weight of {_first_of(whole)} is computed of "
        "parameters and has the shape of none: every rank has all of it. Where a product of parameters is added to a "
        "matrix, or one is scaled, masked or divided by lengths, it is cut as that matrix"
    )


def _whole_attention(
    graph: CapturedGraph, roles: Roles, entries: dict[str, OperatorEntry], axis: int, ranks: int
) -> Iterator[int]:
    """The first product of each attention, one of layers alike, whose heads the ranks of an axis could share, and which
    is whole on each.
    """
    seen = set[str]()
    for i in sorted(roles.written_out | roles.attentions):
        node = graph.nodes[i]
        path = starred(node.name.partition("/")[0])
        if node.phase == "backward" or path in seen or i not in roles.layered:
            continue
        if not is_contraction(node) and i not in roles.attentions:
            continue
        heads, rest = divmod(math.prod(graph.meta(Ref(i)).shape[:-2]), graph.batch)
        if rest or heads % ranks or not heads:
            continue
        seen.add(path)
        if not any(_is_cut(layout, axis) for layout in (*entries[node.name].inputs, *entries[node.name].outputs)):
            yield i


def _can_be_cut(graph: CapturedGraph, index: int, offered: Offered, prices: Prices) -> bool:
    """Whether some plan of what a scheme leaves on its axis alone has products of an operator cut by heads, as far as
    the time tells that there is for it.
    """
    strategies = list(offered.strategies)
    dims = {S(dim) for dim in range(len(graph.meta(Ref(index)).shape) - 2)}
    strategies[index] = tuple(each for each in strategies[index] if each.outputs[0] and each.outputs[0][0] in dims)
    if not strategies[index]:
        return False
    offered = replace(offered, strategies=tuple(strategies))
    with suppress(TimeoutError):
        until_s = time.monotonic() + LOOKED_S
        return first_answer(graph, offered, prices, len(graph.nodes), until_s) is not Status.INFEASIBLE
    return True


def _is_cut(layout: Layout | None, axis: int) -> bool:
    return layout is not None and layout[axis].kind != "R"


def _first_of(nodes: list[Node]) -> str:
    also = f" and of {len(nodes) - 1} more" if nodes[1:] else ""
    return f"{where_of(nodes[0])}{also}"
