"""Products in groups of rows: the rows of a group meet a matrix of their own, as tokens meet their experts.

Capture writes them with the rows in any order (:mod:`autoshard.capture.operators.grouped_products`): ``x`` (S, K),
``group`` (S), ``weight`` (G, K, N). They are cut along rows, columns, the sum, and the groups: a rank with some of the
matrices multiplies the rows of their groups, and has zeros for the others, which add up.

Where the order of the rows is seen elsewhere they stay as the model has them. transformers has an operator for what
torch's own cannot run (other dtypes than bfloat16): ``input`` (M, K), ``weight`` (G, K, N), and ``offs`` (G), where the
rows of each group end.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..capture import Node
from ..layout import P_SUM, Layout, R, S, local_range
from .operator import LocalCall, Metas, Operator, Shape, enter
from .rule import Rule

aten = torch.ops.aten


def _product_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Rows, the summed dim, columns, groups; and addends of one of the two."""
    return [
        Rule((S(0), S(0), R), (S(0),)),
        Rule((S(1), R, S(1)), (P_SUM,)),
        Rule((R, R, S(2)), (S(1),)),
        Rule((R, R, S(0)), (P_SUM,)),
        Rule((P_SUM, R, R), (P_SUM,)),
        Rule((R, R, P_SUM), (P_SUM,)),
    ]


def _outer_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Rows, which are summed; the columns of either; groups, of which a rank makes some; and addends of one."""
    return [
        Rule((S(0), S(0), S(0)), (P_SUM,)),
        Rule((S(1), R, R), (S(1),)),
        Rule((R, S(1), R), (S(2),)),
        Rule((R, R, R), (S(0),)),
        Rule((P_SUM, R, R), (P_SUM,)),
        Rule((R, P_SUM, R), (P_SUM,)),
    ]


def _of_groups(call: LocalCall) -> Any:
    """A rank with a block of the groups counts from its first one."""
    of_product = len(call.metas[2].shape) == 3
    groups = call.metas[2].shape[0] if of_product else call.args[3]
    layout = call.inputs[2] if of_product else call.outputs[0]
    assert layout is not None
    start, stop = local_range(groups, layout, 0, call.mesh, call.coordinate)
    if stop - start == groups:
        return call.run(call.node.op, *call.args)
    position = 1 if of_product else 2
    args = list(call.args)
    args[position] = call.run(aten.sub.Scalar, args[position], start)
    if not of_product:
        args[3] = stop - start
    return call.run(call.node.op, *args)


def _with_groups(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Integers are groups that there are."""
    return tuple(value if value.is_floating_point() else value.remainder(node.args[3]) for value in values)


def _flops_of_groups(node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """Two for each row and number of its matrix; where a rank has some of the groups, as if rows were spread evenly."""
    of_product = len(inputs[1]) == 1
    matrices = inputs[2] if of_product else outputs[0]
    return 2.0 * inputs[0][0] * math.prod(matrices) / int(node.args[3])


def _passes(node: Node, inputs: Metas, layouts: tuple[Layout, ...]) -> float:
    """Rows are sorted before the product and put back behind it: written and read once more."""
    return 3.0


def _rules(node: Node, inputs: Metas) -> list[Rule]:
    """Rows, the summed dim, columns; and addends of one of the two."""
    return [
        Rule((S(0), R, R), (S(0),)),
        Rule((S(1), S(1), R), (P_SUM,)),
        Rule((R, S(2), R), (S(1),)),
        Rule((P_SUM, R, R), (P_SUM,)),
        Rule((R, P_SUM, R), (P_SUM,)),
    ]


def _backward_rules(node: Node, inputs: Metas) -> list[Rule]:
    """The gradients of both from that of the result, the last one; cut as in the forward."""
    return [
        Rule((S(0), R, R, S(0)), (S(0), P_SUM)),
        Rule((S(1), S(1), R, R), (S(1), S(1))),
        Rule((R, S(2), R, S(1)), (P_SUM, S(2))),
        Rule((R, R, R, P_SUM), (P_SUM, P_SUM)),
    ]


def _of_rows(call: LocalCall) -> Any:
    """Of a block of rows the groups end where they end in it: at its start or its end for those beyond."""
    rows, weight, ends, *others = call.args
    length = call.metas[0].shape[0]
    start, stop = local_range(length, call.inputs[0], 0, call.mesh, call.coordinate)
    if stop - start < length:
        ends = call.run(aten.clamp.default, call.run(aten.sub.Scalar, ends, start), 0, stop - start)
    return call.run(call.node.op, rows, weight, ends, *others)


def _flops(products: int, node: Node, inputs: list[Shape], outputs: list[Shape]) -> float:
    """Two (multiply, add) for each row and number of its matrix; in the backward two such products."""
    return products * 2.0 * inputs[0][0] * math.prod(inputs[1][1:])


_OURS = Operator(
    local=_of_groups,
    meant=_with_groups,
    kernel="matmul",
    passes=_passes,
    flops=_flops_of_groups,
)
enter(
    "grouped_product",
    replace(_OURS, rules=_product_rules, traits=("contraction", "grouped")),
    namespace="autoshard",
)
enter("grouped_outer", replace(_OURS, rules=_outer_rules, traits=("contraction",)), namespace="autoshard")
enter(
    "grouped_mm_fallback",
    Operator(rules=_rules, local=_of_rows, kernel="matmul", flops=partial(_flops, 1)),
    namespace="transformers",
)
enter(
    "grouped_mm_fallback_backward",
    Operator(rules=_backward_rules, local=_of_rows, kernel="matmul", flops=partial(_flops, 2)),
    namespace="transformers",
)
