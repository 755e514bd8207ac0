"""One number in all places of a mask: ``x[mask] = mean``, ``x[torch.where(mask)] = 0.0``.

How many places there are is seen when a step runs. Written as a fill by the mask they need not be counted, neither
here nor for the gradient of the number.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..examples import example, is_unknown, new_call, shape_of, tensor_of
from .masks import mask_of, memory_of, written_into


def fill_by_masks(graph: fx.Graph) -> None:
    """Rewrites such writes in a traced forward, in place."""
    written = written_into(graph)
    for node in list(graph.nodes):
        if node.target is not operator.setitem:
            continue
        x, index, value = node.args
        mask, whole, one = mask_of(index), tensor_of(x), tensor_of(value)
        if mask is None or whole is None or not _is_number(value):
            continue
        by_places = any(is_unknown(example(each)) for each in node.all_input_nodes)
        if by_places and memory_of(mask) in written:
            continue
        if not by_places and (one is None or not one.requires_grad):
            continue  # which torch fills by itself
        kind = one.dtype if one is not None else torch.float32 if isinstance(value, float) else torch.bool
        if not torch.can_cast(kind, whole.dtype):
            continue
        with graph.inserting_before(node):
            beside = new_call(node, "reshape", mask, (*shape_of(mask), *(1,) * (whole.dim() - len(shape_of(mask)))))
            new_call(node, "masked_fill_", x, beside, value)
        graph.erase_node(node)


def _is_number(value: object) -> bool:
    tensor = tensor_of(value)
    return isinstance(value, (bool, int, float)) or (tensor is not None and tensor.dim() == 0)
