"""Which dim of what a model is called with is the batch: (rows, ...), or (steps, rows, ...), which torch's recurrent
layers and attention take unless they are told ``batch_first=True``.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .examples import shape_of
from .taken_apart.recurrent import RECURRENT

_WITH_HEADS = 4
_BATCHED: dict[Any, int] = {
    **dict.fromkeys((torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell), 2),
    **{torch.conv1d: 3, torch.conv2d: 4, torch.conv3d: 5, F.scaled_dot_product_attention: _WITH_HEADS},
}
"""Layers that take rows first, and the dims of what they take then."""
_PRODUCTS = {torch.bmm, torch.baddbmm, torch.matmul, operator.matmul, "bmm", "baddbmm", "matmul"}


def batch_dim(graph: fx.Graph) -> int:
    """1 where the rows that layers of torch take, or attention that is written in products, are as many as dim 1 of the
    first tensor that a model is called with, and none takes as many as its dim 0; else 0.
    """
    steps, rows, *_ = (*first_shape(graph), 0, 0)
    if rows < 2:
        return 0
    taken = {rows if _attends(node, steps, rows) else _rows_of(node) for node in graph.nodes}
    return int(rows in taken and steps not in taken)


def first_shape(graph: fx.Graph) -> tuple[int, ...]:
    """The shape of the first tensor with dims that a model is called with; none where none has dims."""
    return next((tuple(shape) for shape in map(shape_of, graph.find_nodes(op="placeholder")) if shape), ())


def _attends(node: fx.Node, steps: int, rows: int) -> bool:
    """Whether a node multiplies matrices of so many steps: (rows, heads, steps, ...), or rows and heads as one dim."""
    shapes = [shape_of(x) for x in node.all_input_nodes] if node.target in _PRODUCTS else []
    if not shapes or not any(steps in shape[-2:] for shape in shapes):
        return False
    if all(len(shape) == _WITH_HEADS for shape in shapes):
        return {shape[0] for shape in shapes} == {rows}
    folded = {shape[0] for shape in shapes if len(shape) == _WITH_HEADS - 1}
    return len(folded) == 1 and all(n > rows and n % rows == 0 and n % steps for n in folded)


def _rows_of(node: fx.Node) -> int | None:
    """How many rows a layer takes; None where that is not known, or the node is no layer."""
    given: Any = node.args[0] if node.args else node.kwargs.get("query", node.kwargs.get("input"))
    shape, target = shape_of(given), node.target
    if target in RECURRENT and isinstance(node.args[3], bool) and len(shape) == 3:
        return shape[0 if node.args[-1] else 1]
    if target is F.multi_head_attention_forward and len(shape) == 3:
        return shape[1]
    return shape[0] if len(shape) == _BATCHED.get(target) else None
