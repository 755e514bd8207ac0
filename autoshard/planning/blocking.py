"""Which operator stands in the way of a scheme on an axis, looked for on that axis alone.

First what reaches each operator is followed, which takes no solver. Where that finds none, as what an operator takes is
looked up for each of its inputs apart, the program is solved for the first half of the operators, or the first quarter,
and so on: the one with which it has no answer any more is named.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from cost_models import Profile
from solver import Status, solve

from ..capture import CapturedGraph, Node, Ref
from ..constraints import AxisScheme
from ..constraints.compile import compile_constraints
from ..constraints.limits import Limits
from ..errors import ConstraintError, StrategyWarning
from ..layout import Layout, Placement
from ..mesh import Mesh
from ..redistribution import Banned
from ..redistribution.steps import step_on
from ..strategies import Rulebook, Strategy
from .candidates import candidates
from .formulation import assemble
from .pricing import Prices

ANY_PLAN = 1e9
"""A gap at which the solver stops with the first assignment it finds."""
EACH_S = 5.0
"""Seconds for each program of a part of the operators, of which there are about ten."""
_CUT_THE_BATCH = ("ddp", "fsdp", "ep")


def why_not(
    graph: CapturedGraph, scheme: AxisScheme, mesh: Mesh, profile: Profile, rulebook: Rulebook, solves: bool
) -> str:
    """The operator for which there is no plan under a scheme, and what people do about it; empty where none is found.

    Args:
        mesh: of whose axes the scheme is on one; the others are left out.
        profile: prices what is sent, and so says what can be.
        solves: whether programs are solved for it where following the placements finds none.
    """
    axis = Mesh(mesh.axes[scheme.axis : scheme.axis + 1], mesh.shape[scheme.axis : scheme.axis + 1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrategyWarning)
        try:
            limits = compile_constraints([replace(scheme, axis=0)], graph, axis)
            offered = candidates(graph, axis, limits, rulebook)
        except ConstraintError:  # of an annotation in the model that names other axes, too
            return ""
    found = _first_that_cannot(graph, limits, offered)
    cuts_batch = scheme.scheme in _CUT_THE_BATCH
    begun = f"{scheme.text!r} cuts {'the batch' if cuts_batch else 'layers'}, but"
    if found is not None:
        where, has_rules = _where(graph.nodes[found]), len(offered[found]) > 1
        if not has_rules:
            return (
                f"{begun} {where} has no rule by which it is cut; for one of your own, register_operator gives it one"
            )
        if cuts_batch and graph.batch % axis.size:
            return (
                f"{begun} {where} has no rule for blocks of {graph.batch} rows over {axis.size} ranks, of which "
                "one is shorter: give the batch a multiple of their number, or plan without the baseline"
            )
        if cuts_batch:
            return f"{begun} {where} {_WHAT_PEOPLE_DO}{_or_steps(graph)}"
    elif solves:
        found = _first_without_an_answer(graph, axis, limits, offered, Prices(graph, axis, profile))
    if found is None:
        return ""
    return (
        f"{begun} {_where(graph.nodes[found])} goes on with nothing that the operators before it can make, and the "
        "scheme lets nothing else be sent. Plan without the baseline: then what is needed is gathered"
    )


def _or_steps(graph: CapturedGraph) -> str:
    """That the batch may be dim 1, where it is as long as dim 0, so that nothing tells them apart."""
    rows = graph.batch
    if graph.batch_dim or graph.first_shape[1:2] != (rows,):
        return ""
    return f". Where the batch is dim 1, which is as long ({rows}), plan for another number of steps: then it is found"


def _where(node: Node) -> str:
    return f"{node.name} ({node.source})" if node.source else node.name


def _first_that_cannot(graph: CapturedGraph, limits: Limits, offered: Sequence[tuple[Strategy, ...]]) -> int | None:
    """The first operator that can run on nothing that earlier operators make and the scheme lets be sent.

    Follows the placements that each tensor can have. What an operator can take is looked up for each of its inputs
    apart, so an operator may be missed, but none is blamed that could run.
    """
    possible: dict[Ref, set[Placement]] = {}
    for i, node in enumerate(graph.nodes):
        fitting = [
            strategy.outputs
            for strategy in offered[i]
            if all(layout[0] in possible[ref] for ref, layout in zip(node.inputs, strategy.inputs))
        ]
        if not fitting:
            return i
        for k, meta in enumerate(node.outputs):
            ref = Ref(i, k)
            made = {layout[0] for layouts in fitting if (layout := layouts[k]) is not None}
            possible[ref] = made if meta is None else _sent(made, len(meta.shape), limits.banned(ref))
    return None


def _first_without_an_answer(
    graph: CapturedGraph, mesh: Mesh, limits: Limits, offered: tuple[tuple[Strategy, ...], ...], prices: Prices
) -> int | None:
    """The operator up to which there is no plan, though there is one without it; None where that is not found out."""

    def has_none(upto: int) -> bool:
        part = replace(graph, nodes=graph.nodes[:upto], outputs=(), gradients=(), mutations=())
        program = assemble(
            part,
            mesh,
            prices.on(part),
            limits,
            offered[:upto],
            objective="communication-time",
            constraints=(),
            tie_layers=False,
            keep_copies=True,
        )
        solution = solve(program.problem, time_limit_s=EACH_S, relative_gap=ANY_PLAN, explains=False)
        return solution.status is Status.INFEASIBLE

    first = bisect_left(range(len(graph.nodes) + 1), True, key=has_none)
    return first - 1 if 0 < first <= len(graph.nodes) else None


def _sent(made: set[Placement], dims: int, banned: Banned) -> set[Placement]:
    """What collectives and slices that are not banned make of these placements of a tensor, one after the other: a
    parameter that is cut along dim 0 is gathered, and cut along dim 1.
    """
    found, waiting = set(made), list(made)
    wanted = [Placement("R"), *(Placement("S", dim) for dim in range(dims))]
    while waiting:
        before = waiting.pop()
        for after in wanted:
            step = step_on(Layout((before,)), Layout((after,)), (0,))
            moves = () if step is None else ((step.kind, 0, dim) for dim in (-1, step.source))
            if after not in found and step is not None and banned.isdisjoint(moves):
                found.add(after)
                waiting.append(after)
    return found


_WHAT_PEOPLE_DO = (
    "mixes its rows, as a contrastive loss does, for which people gather the features of all ranks. Plan without the "
    "baseline: then what is needed is gathered"
)
