"""Products in groups of rows: the rows of a group meet a matrix of their own, as tokens meet their experts.

The operator is the one that transformers has for models of experts where torch's own cannot run (other dtypes than
bfloat16): ``input`` (M, K), ``weight`` (G, K, N), and ``offs`` (G), where the rows of each group end.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from ..capture import Node
from ..layout import P_SUM, R, S, local_range
from .operator import LocalCall, Metas, Operator, Shape, enter
from .rule import Rule

aten = torch.ops.aten


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
