"""The largest and the least number over the batch, in the parts that capture writes them as
(:mod:`autoshard.capture.operators.extreme_parts`).
"""

from __future__ import annotations

from typing import Any

import torch

from ..capture import Node
from ..layout import P, Placement, R, S
from .operator import LocalCall, Metas, Operator, enter
from .reduced_dims import kept_dims, reads_no_rows_in_parts, whole_along
from .rule import Rule

aten = torch.ops.aten
ours = torch.ops.autoshard


def _how(node: Node) -> tuple[tuple[int, ...], bool, bool]:
    """The dims that it goes over, whether they are kept, and whether it is the least number."""
    dims, keepdim, is_least = node.args[-3:]
    return dims, keepdim, is_least


def _dims(node: Node) -> tuple[int, ...]:
    return _how(node)[0]


def _kept(node: Node, rank: int) -> list[tuple[Placement, Placement]]:
    """How the tensor is cut along a dim that it does not go over, and how the result is."""
    dims, keepdim, _ = _how(node)
    return [(S(d), S(at)) for d, at in kept_dims(rank, dims, keepdim)]


def _rules_of_part(node: Node, inputs: Metas) -> list[Rule]:
    kept = _kept(node, len(inputs[0].shape))
    return [*(Rule((S(d),), (P("max"),)) for d in _dims(node)), *(Rule((a,), (b,)) for a, b in kept)]


def _rules(node: Node, inputs: Metas) -> list[Rule]:
    kept = _kept(node, len(inputs[0].shape))
    return [*(Rule((S(d), R), (R,)) for d in _dims(node)), *(Rule((a, b), (b,)) for a, b in kept)]


_as_one = whole_along(_dims)


def _local(call: LocalCall) -> Any:
    if not _as_one(call.node, call.inputs):
        return call.run(call.node.op, *call.args)
    dims, keepdim, is_least = _how(call.node)
    return call.run(aten.amin.default if is_least else aten.amax.default, call.args[0], dims, keepdim)


def _its_whole(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return values[0], ours.as_whole(values[0], *_how(node))


enter("as_whole", Operator(rules=_rules_of_part, as_one=_as_one, kernel="reduction"), namespace="autoshard")
enter(
    "extreme",
    Operator(
        rules=_rules,
        local=_local,
        parts=(1,),
        as_one=_as_one,
        meant=_its_whole,
        kernel="reduction",
        passes=reads_no_rows_in_parts(_as_one),
    ),
    namespace="autoshard",
)
