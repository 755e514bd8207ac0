"""Functions of torch whose operators cannot be cut, in parts that can."""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx

from .bags import embedding_bag, has_one_length
from .multihead import has_a_batch, multihead_attention
from .recurrent import STEP_BY_STEP


def take_apart(module: fx.GraphModule) -> None:
    """Rewrites a graph of torch functions in place: recurrent modules, but for those on packed sequences, bags of one
    length, and attention of several heads.
    """
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in STEP_BY_STEP and isinstance(node.args[3], bool):
            node.target = STEP_BY_STEP[node.target]
        elif node.target is F.embedding_bag and has_one_length(*node.args, **node.kwargs):
            node.target = embedding_bag
        elif node.target is F.multi_head_attention_forward and has_a_batch(
            _dims(node.args[0]), *node.args, **node.kwargs
        ):
            node.target = multihead_attention
    module.recompile()


def _dims(node: object) -> int:
    """The number of dims of what a node gives."""
    value = node.meta["example_value"] if isinstance(node, fx.Node) else node
    return value.dim()  # type: ignore[union-attr]
