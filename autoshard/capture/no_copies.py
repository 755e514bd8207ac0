"""Operators that give their argument, or views of it, where torch traces copies: a write into the one is one into both.

Source: ``_dropout_impl`` in aten/src/ATen/native/Dropout.cpp returns its input where nothing is dropped, and torch's
decomposition (torch/_decomp/decompositions.py) clones it; ``unsafe_split`` is declared to make no views, and does.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .examples import tensor_of

# Dropouts, with what their argument ``training`` is by default.
_DROPOUTS: dict[Any, bool | None] = {
    F.dropout: True,
    F.alpha_dropout: False,
    F.dropout2d: True,
    F.dropout3d: True,
    F.feature_alpha_dropout: False,
    torch.dropout: None,
    torch.alpha_dropout: None,
    torch.feature_dropout: None,
    torch.feature_alpha_dropout: None,
}
_VIEWS: dict[Any, Any] = {
    torch.unsafe_chunk: torch.chunk,
    torch.unsafe_split: torch.split,
    torch.unsafe_split_with_sizes: torch.split_with_sizes,
    "unsafe_chunk": "chunk",
    "unsafe_split": "split",
    "unsafe_split_with_sizes": "split_with_sizes",
}


def without_copies(graph: fx.Graph) -> None:
    """Writes such operators of dynamo's graph as what they do: nothing, or views."""
    for node in graph.nodes:
        if node.target in _VIEWS:
            node.target = _VIEWS[node.target]
        elif node.target in _DROPOUTS and _drops_nothing(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)


def _drops_nothing(node: fx.Node) -> bool:
    named = dict(zip(("input", "p", "training"), node.args)) | node.kwargs
    p, training = named.get("p", 0.5), named.get("training", named.get("train", _DROPOUTS[node.target]))
    x = tensor_of(node.all_input_nodes[0]) if len(node.all_input_nodes) == 1 else None
    return x is not None and (training is False or (isinstance(p, (int, float)) and p == 0))
