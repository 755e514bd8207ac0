"""Operators that draw a random number for each element: a rank can draw any block of the result.

No rule of theirs can be checked by numbers: on shards they draw others than on the whole. Each element is drawn by
itself, whatever the other elements are, so every dim can be cut that all tensors have alike; the verified law is the
distribution (``tests/distributed/test_draws.py``). Left out are operators that draw how often they need to
(``poisson``, ``binomial``), or for some elements alone (slopes of negative numbers), which one process draws in a row.
"""

from __future__ import annotations

from typing import Any

import torch

from ..capture import Node
from ..layout import S
from .local import on_rows, with_local_size
from .operator import LocalCall, Metas, Operator, enter
from .rule import Rule

aten = torch.ops.aten


def _any_block(node: Node, inputs: Metas) -> list[Rule]:
    shapes = {meta.shape for meta in (*inputs, *node.outputs) if meta is not None}
    if len(shapes) > 1:
        return []
    (shape,) = shapes
    return [Rule((S(d),) * len(inputs), (S(d),) * len(node.outputs)) for d in range(len(shape))]


def _where_none_is_drawn(node: Node, inputs: Metas) -> list[Rule]:
    """Slopes of negative numbers are drawn in training alone."""
    is_training = node.args[4] if len(node.args) > 4 else dict(node.kwargs).get("training", False)
    return [] if is_training else _any_block(node, inputs)


def _dropout(call: LocalCall) -> Any:
    """Where all is dropped nothing is drawn: torch's ``dropout`` multiplies by zeros then, and this one would draw."""
    x, p, *is_training = call.args
    if p < 1 or is_training == [False]:
        return call.run(call.node.op, *call.args)
    return call.run(call.node.op, call.run(aten.mul.Scalar, x, 0.0), 0.0, False)


enter("native_dropout", Operator(rules=_any_block, local=_dropout, traits=("drawn",)))
enter(
    "bernoulli rand_like randn_like randint_like normal normal_functional uniform exponential "
    "log_normal cauchy geometric random",
    Operator(rules=_any_block, traits=("drawn",)),
)
enter("rrelu_with_noise_functional", Operator(rules=_where_none_is_drawn, traits=("drawn",)))
enter(
    "normal.Tensor_Tensor normal.float_Tensor",
    Operator(rules=_any_block, local=on_rows(or_alike=False), traits=("drawn",)),
)
enter("rand randn", Operator(rules=_any_block, local=with_local_size(0), traits=("drawn",)))
enter("randint", Operator(rules=_any_block, local=with_local_size(1), traits=("drawn",)))
enter("randint.low normal.float_float", Operator(rules=_any_block, local=with_local_size(2), traits=("drawn",)))
