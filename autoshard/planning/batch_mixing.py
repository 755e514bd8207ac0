"""Which operator stands in the way of a scheme that cuts the batch: the first whose rules do not go with cut rows."""

from __future__ import annotations

import warnings

from ..capture import CapturedGraph, Node, Ref
from ..constraints.roles import Roles
from ..errors import StrategyWarning
from ..layout import P_SUM, Placement, R, S
from ..mesh import Mesh
from ..strategies import Enumerator


def why_not_cut(graph: CapturedGraph, parts: int) -> str:
    """The operator for which a batch cannot be cut over an axis of ``parts`` ranks, and what people do about it; empty
    where none is found.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StrategyWarning)
        node, has_rules = _first_that_cannot(graph, parts)
    if node is None:
        return ""
    where = f" ({node.source})" if node.source else ""
    if not has_rules:
        return f"{node.name}{where} has no rule by which it is cut; for one of your own, register_operator gives it one"
    return f"{node.name}{where} {_what_people_do(node)}"


def _first_that_cannot(graph: CapturedGraph, parts: int) -> tuple[Node | None, bool]:
    """The first operator that can run neither on some rows of the batch nor on what earlier operators make of them.

    Follows the placements that each tensor can have on one axis of ``parts`` ranks where inputs are cut along the
    batch, parameters are whole, and only gradients and single numbers are sent. What an operator can take is looked up
    for each of its inputs apart, so an operator may be missed, but none is blamed that could run.

    Returns:
        The operator, and whether it has rules at all beside being whole.
    """
    roles = Roles(graph)
    enumerator = Enumerator(graph, Mesh(("batch",), (parts,)))
    possible: dict[Ref, set[Placement]] = {}
    for i, node in enumerate(graph.nodes):
        if node.kind != "operator":
            possible[Ref(i)] = {S(0)} if i in roles.batched else {R, S(0)} if node.kind == "tangent" else {R}
            continue
        offered = enumerator.strategies(node)
        fitting = [
            strategy.outputs
            for strategy in offered
            if all(layout[0] in possible[ref] for ref, layout in zip(node.inputs, strategy.inputs))
        ]
        if not fitting:
            return node, len(offered) > 1
        for k in range(len(node.outputs)):
            ref = Ref(i, k)
            found = {layout[0] for layouts in fitting if (layout := layouts[k]) is not None}
            is_sent = found and (roles.is_scalar(ref) or roles.of(ref) == "gradients")
            possible[ref] = found | ({R} if is_sent and P_SUM in found else set())
    return None, False


def _what_people_do(node: Node) -> str:
    assert node.op is not None
    if "batch_norm" in node.op._schema.name:
        return (
            "takes statistics of the whole batch. Data parallel training elsewhere takes each rank's own, which "
            "computes something else, or sums them over the ranks (SyncBatchNorm). Use a norm of single rows "
            "(GroupNorm, LayerNorm), put the norm into eval mode, or plan without the baseline"
        )
    return (
        "mixes its rows, as a contrastive loss does, for which people gather the features of all ranks. Plan without "
        "the baseline: then what is needed is gathered"
    )
