"""Log-softmax, its backward and logsumexp in the parts that capture writes them as
(:mod:`autoshard.capture.operators.softmax_parts`).

Whole, or cut along another dim than it goes over, it is torch's own kernel and has no parts. Cut along that dim, a rank
makes numbers of its block of each row, all-reduces make them those of the row, and the rank its block of the result, or
all of a logsumexp.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..capture import Node
from ..layout import P_SUM, Layout, P, Placement, R, S
from .local import in_rows
from .operator import LocalCall, Metas, Operator, enter
from .reduced_dims import reads_no_rows_in_parts
from .rule import Rule

aten = torch.ops.aten
ours = torch.ops.autoshard

Tensors = tuple[torch.Tensor, ...]
_BLOCK = S(-1)
"""In what follows the placement that cuts rows."""


def _dim(node: Node) -> int:
    """The dim that rows lie along: the argument behind the tensors."""
    found: int = node.args[len(node.inputs)]
    return found


def _rules(taken: tuple[Placement, ...], given: Placement, node: Node, inputs: Metas) -> list[Rule]:
    """Rows are cut as said here, and other dims alike in all tensors."""
    dim = _dim(node)
    *wanted, result = (S(dim) if placement is _BLOCK else placement for placement in (*taken, given))
    others = (d for d in range(len(inputs[0].shape)) if d != dim)
    return [Rule(tuple(wanted), (result,)), *(Rule((S(d),) * len(inputs), (S(d),)) for d in others)]


def _logsumexp_rules(node: Node, inputs: Metas) -> list[Rule]:
    """Rows are cut, or another dim: in the result it is one further to the front where rows left it."""
    dim, keeps = _dim(node), node.args[-1]
    others = ((d, d - (d > dim and not keeps)) for d in range(len(inputs[0].shape)) if d != dim)
    return [Rule((S(dim), R, R), (R,)), *(Rule((S(d),) * 3, (S(made),)) for d, made in others)]


def _as_one(node: Node, layouts: tuple[Layout, ...]) -> bool:
    return not layouts[0].axes_of(_dim(node))


def _forward(call: LocalCall) -> Any:
    if _as_one(call.node, call.inputs):
        return call.run(aten._log_softmax.default, call.args[0], _dim(call.node), False)
    return call.run(call.node.op, *call.args)


def _logsumexp(call: LocalCall) -> Any:
    if _as_one(call.node, call.inputs):
        return call.run(aten.logsumexp.default, call.args[0], [_dim(call.node)], call.args[-1])
    return call.run(call.node.op, *call.args)


def _backward(call: LocalCall) -> Any:
    if _as_one(call.node, call.inputs):
        grad, result, _, dim, dtype = call.args
        grad, result = in_rows(call, grad, result, or_alike=False)
        return call.run(aten._log_softmax_backward_data.default, grad, result, dim, dtype)
    return call.run(call.node.op, *call.args)


def _passes_of_sum(node: Node, inputs: Metas, layouts: tuple[Layout, ...]) -> float:
    """What is subtracted, its exponentials and their sum are three kernels: five passes instead of one."""
    return 5.0


def _passes_of_backward(node: Node, inputs: Metas, layouts: tuple[Layout, ...]) -> float:
    """In parts the exponentials are written, and read again: five passes instead of three."""
    return 1.0 if _as_one(node, layouts) else 5 / 3


def _its_largest(node: Node, values: Tensors) -> Tensors:
    return values[0], ours.row_max(values[0], _dim(node))


def _its_numbers(node: Node, values: Tensors) -> Tensors:
    largest = ours.row_max(values[0], _dim(node))
    return values[0], largest, ours.row_sum(values[0], largest, _dim(node))


def _its_total(node: Node, values: Tensors) -> Tensors:
    return *values[:2], ours.row_total(values[0], _dim(node))


enter(
    "row_max",
    Operator(rules=partial(_rules, (_BLOCK,), P("max")), as_one=_as_one, kernel="reduction", traits=("shift",)),
    namespace="autoshard",
)
enter(
    "row_sum",
    Operator(
        rules=partial(_rules, (_BLOCK, R), P_SUM),
        as_one=_as_one,
        meant=_its_largest,
        kernel="reduction",
        passes=_passes_of_sum,
    ),
    namespace="autoshard",
)
enter(
    "log_softmax",
    Operator(
        rules=partial(_rules, (_BLOCK, R, R), _BLOCK),
        local=_forward,
        parts=(1, 2),
        as_one=_as_one,
        meant=_its_numbers,
        kernel="softmax",
    ),
    namespace="autoshard",
)
enter(
    "logsumexp",
    Operator(
        rules=_logsumexp_rules,
        local=_logsumexp,
        parts=(1, 2),
        as_one=_as_one,
        meant=_its_numbers,
        kernel="softmax",
        passes=reads_no_rows_in_parts(_as_one),
    ),
    namespace="autoshard",
)
enter(
    "row_total",
    Operator(rules=partial(_rules, (_BLOCK,), P_SUM), as_one=_as_one, kernel="reduction"),
    namespace="autoshard",
)
enter(
    "log_softmax_backward",
    Operator(
        rules=partial(_rules, (_BLOCK, _BLOCK, R), _BLOCK),
        local=_backward,
        parts=(2,),
        as_one=_as_one,
        meant=_its_total,
        kernel="softmax",
        passes=_passes_of_backward,
    ),
    namespace="autoshard",
)
