"""Variances and standard deviations, in the parts that capture writes them as
(:mod:`autoshard.capture.operators.spread_parts`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..capture import Node
from ..layout import P_SUM, R, S
from .operator import LocalCall, Metas, Operator, enter
from .reduced_dims import kept_dims, reads_no_rows_in_parts, whole_along
from .rule import Rule

aten = torch.ops.aten
ours = torch.ops.autoshard

Tensors = tuple[torch.Tensor, ...]


def _dims(node: Node) -> tuple[int, ...]:
    """The dims that rows lie along: the argument behind the tensors."""
    found: tuple[int, ...] = node.args[len(node.inputs)]
    return found


def _rules_of_part(node: Node, inputs: Metas) -> list[Rule]:
    """Rows are cut, and what ranks make of their numbers adds up; or another dim, in all tensors."""
    dims, numbers = _dims(node), (R,) * (len(inputs) - 1)
    others = (d for d in range(len(inputs[0].shape)) if d not in dims)
    along = (Rule((S(d), *numbers), (P_SUM,)) for d in dims)
    return [*along, *(Rule((S(d),) * len(inputs), (S(d),)) for d in others)]


def _rules(node: Node, inputs: Metas) -> list[Rule]:
    """Rows are cut, or another dim."""
    dims, results = _dims(node), len(node.outputs)
    along = (Rule((S(d), R, R), (R,) * results) for d in dims)
    kept = kept_dims(len(inputs[0].shape), dims, node.args[5])
    return [*along, *(Rule((S(d),) * 3, (S(at),) * results) for d, at in kept)]


_as_one = whole_along(_dims)


def _local(call: LocalCall) -> Any:
    if not _as_one(call.node, call.inputs):
        return call.run(call.node.op, *call.args)
    x, _, _, dims, correction, keepdim, is_root = call.args
    if len(call.node.outputs) == 2:
        op = aten.std_mean.correction if is_root else aten.var_mean.correction
    else:
        op = aten.std.correction if is_root else aten.var.correction
    return call.run(op, x, dims, correction=correction, keepdim=keepdim)


def _count(node: Node, shape: list[int] | torch.Size) -> int:
    return math.prod(shape[d] for d in _dims(node))


def _small_mean(node: Node, inputs: Metas, shapes: list[list[int]], length: dict[int, int]) -> tuple[Any, ...]:
    """The count of numbers of a row follows the small rows."""
    return (*node.args[:-1], _count(node, shapes[0]))


def _its_mean(node: Node, values: Tensors) -> Tensors:
    x, dims = values[0], _dims(node)
    return x, ours.row_mean(x, dims, _count(node, x.shape))


def _its_numbers(node: Node, values: Tensors) -> Tensors:
    x, mean = _its_mean(node, values)
    divisor = _count(node, x.shape) - node.args[4]
    return x, mean, ours.row_variance(x, mean, _dims(node), divisor)


enter(
    "row_mean",
    Operator(rules=_rules_of_part, as_one=_as_one, small=_small_mean, kernel="reduction"),
    namespace="autoshard",
)
enter(
    "row_variance",
    Operator(rules=_rules_of_part, as_one=_as_one, meant=_its_mean, kernel="reduction"),
    namespace="autoshard",
)
enter(
    "spread spread_and_mean",
    Operator(
        rules=_rules,
        local=_local,
        parts=(1, 2),
        as_one=_as_one,
        meant=_its_numbers,
        kernel="reduction",
        passes=reads_no_rows_in_parts(_as_one),
    ),
    namespace="autoshard",
)
