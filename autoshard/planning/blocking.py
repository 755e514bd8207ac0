"""Which operator stands in the way of a scheme on an axis, looked for on that axis alone.

First what reaches each operator is followed, which takes no solver. Where that finds none, as what an operator takes is
looked up for each of its inputs apart, the program is solved for the first half of the operators, or the first quarter,
and so on: the one with which it has no answer any more is named.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from contextlib import suppress
from dataclasses import replace

from cost_models import Profile
from solver import Status

from ..capture import CapturedGraph
from ..constraints import CUT_OF_INPUTS, CUT_THE_BATCH, AxisScheme
from ..mesh import Mesh
from ..plans.natural_order import starred
from ..strategies import Rulebook
from .formulation import assemble
from .mixing import Offered, offered_under, where_of, without_strategies
from .pricing import Prices
from .solving import solve

ANY_PLAN = 1e9
"""A gap at which the solver stops with the first assignment it finds."""
EACH_S = 5.0
"""Seconds for each program of a part of the operators, of which there are about ten."""
ALL_S = 30.0
"""Seconds for all of them."""
MOST_GATHERED = 12
"""Operators that are looked for so, at most."""


def why_not(
    graph: CapturedGraph, scheme: AxisScheme, mesh: Mesh, profile: Profile, rulebook: Rulebook, solves: bool
) -> str:
    """The operator for which there is no plan under a scheme, and what people do about it; empty where none is found.

    Args:
        mesh: of whose axes the scheme is on one; the others are left out.
        profile: prices what is sent, and so says what can be.
        solves: whether programs are solved for it where following the placements finds none.
    """
    offered = offered_under(graph, [scheme], mesh, rulebook)
    if offered is None:
        return ""
    axis = offered.mesh
    found = next(without_strategies(graph, offered), None)
    cut = CUT_OF_INPUTS.get(scheme.scheme)
    begun = f"{scheme.text!r} cuts {cut or 'layers'}, but"
    if found is not None:
        where, has_rules = where_of(graph.nodes[found]), len(offered.strategies[found]) > 1
        if not has_rules:
            return (
                f"{begun} {where} has no rule by which it is cut; for one of your own, register_operator gives it one"
            )
        if scheme.scheme in CUT_THE_BATCH and graph.batch % axis.size:
            return (
                f"{begun} {where} has no rule for blocks of {graph.batch} rows over {axis.size} ranks, of which "
                "one is shorter: give the batch a multiple of their number, or plan without the baseline"
            )
    elif solves:
        with suppress(TimeoutError):
            found = first_without_an_answer(graph, offered, profile)
    if found is None:
        return ""
    name, gathered = graph.nodes[found].name, "then what is needed is gathered"
    also = f"{scheme.text} {name}" if scheme.gathering else f"{scheme.text} gathering {name}"
    instead = f"{gathered}. Or write '{also}'" if cut and name not in scheme.gathering else gathered
    return (
        f"{begun} {where_of(graph.nodes[found])} goes on with nothing that the operators before it can make, and the "
        f"scheme lets nothing else be sent. Plan without the baseline: {instead}"
    )


def gathered_for(
    graph: CapturedGraph, scheme: AxisScheme, mesh: Mesh, profile: Profile, rulebook: Rulebook
) -> tuple[str, ...]:
    """The names of operators for which a scheme that cuts the batch has to gather beside those that mix rows: each of
    their inputs can be made as they want it, but not all at once, as where rows are written one by one into a tensor.
    None where nothing stands in its way, and where gathering does not help.

    Args:
        profile: prices what is sent, and so says what can be.
    """
    ranks = mesh.shape[scheme.axis]
    if scheme.scheme not in CUT_THE_BATCH or ranks == 1 or graph.batch % ranks:
        return ()
    found: list[str] = []
    until_s = time.monotonic() + ALL_S
    with suppress(TimeoutError):
        while (offered := offered_under(graph, [scheme.having_also(found)], mesh, rulebook)) is not None:
            at = first_without_an_answer(graph, offered, profile)
            if at is None:
                return tuple(found)
            path, _, role = graph.nodes[at].name.rpartition("/")
            name = f"{starred(path)}/{role}"
            if name in (*scheme.gathering, *found) or len(found) == MOST_GATHERED or time.monotonic() > until_s:
                break
            found.append(name)
    return ()


def first_without_an_answer(graph: CapturedGraph, offered: Offered, profile: Profile) -> int | None:
    """The operator up to which there is no plan, though there is one without it; None where there is one. Layers alike
    are decided alike.

    Raises:
        TimeoutError: it was not found in the time there is for it.
    """
    prices, until_s = Prices(graph, offered.mesh, profile), time.monotonic() + ALL_S

    def has_none(upto: int) -> bool:
        return first_answer(graph, offered, prices, upto, until_s) is Status.INFEASIBLE

    if not has_none(len(graph.nodes)):
        return None
    return bisect_left(range(len(graph.nodes)), True, key=has_none) - 1


def first_answer(graph: CapturedGraph, offered: Offered, prices: Prices, upto: int, until_s: float) -> Status:
    """What the solver says of the program of the first nodes of a graph, stopped at its first answer. Layers alike are
    decided alike.

    Args:
        prices: of the graph on the mesh of what is offered; they say what can be sent.
        until_s: when the time for it ends, on the monotonic clock.

    Raises:
        TimeoutError: it has ended.
    """
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    part, strategies = graph, offered.strategies
    if upto < len(graph.nodes):
        gradients = tuple((name, ref) for name, ref in graph.gradients if ref.node < upto)
        part = replace(graph, nodes=graph.nodes[:upto], outputs=(), gradients=gradients, mutations=())
        strategies = strategies[:upto]
    program = assemble(
        part,
        offered.mesh,
        prices.on(part),
        offered.limits,
        strategies,
        objective="communication-time",
        constraints=(),
        tie_layers=True,
        keep_copies=True,
    )
    limit_s = min(EACH_S, left_s)
    return solve(program.problem, time_limit_s=limit_s, relative_gap=ANY_PLAN, explains=False).status
