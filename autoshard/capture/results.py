"""Results that share memory with each other, or with what the caller has already.

torch's capture knows a gradient only for results that own their memory. So before it sees the model's graph,

* a result that is a parameter, a buffer, an argument or an earlier result leaves the graph. Whoever runs the graph
  returns that very tensor in its place, as the model does, and autograd finds its way through it by itself;
* a result that shares memory with one of those without being it (``y[0]``, ``w.t()``, ``y.detach()``) becomes a copy.

Every other result stays as it is, and so does the graph of a model that has no such results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from .graph import SameTensor


def separate_results(
    module: fx.GraphModule, leaves: Mapping[fx.Node, SameTensor], values: Mapping[fx.Node, torch.Tensor]
) -> dict[int, SameTensor]:
    """Rewrites the results of a graph in place.

    Args:
        leaves: the parameters, buffers and inputs among the nodes of the graph.
        values: what each node gives: the same object where the model has the same tensor, the same storage where its
            tensors share memory.

    Returns:
        For each result that is no new tensor, by its number, what it is. In the place of one that left the graph stands
        None.
    """
    output = module.graph.output_node()
    known = {id(values[node]): same for node, same in leaves.items()}
    owners = {_storage(values[node]): same for node, same in leaves.items()}
    same: dict[int, SameTensor] = {}
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for k, node in enumerate(results):
        if not isinstance(node, fx.Node) or node not in values:
            continue
        value = values[node]
        if id(value) in known:
            same[k], results[k] = known[id(value)], None
            continue
        known[id(value)] = SameTensor("output", str(k))
        owner = owners.setdefault(_storage(value), known[id(value)])
        if owner is not known[id(value)]:
            same[k], results[k] = replace(owner, is_copy=True), _copy(module.graph, node, output)
    output.args = (tuple(results),)
    module.recompile()
    return same


def _copy(graph: fx.Graph, node: fx.Node, before: fx.Node) -> fx.Node:
    with graph.inserting_before(before):
        copy = graph.call_function(torch.clone, (node,), {"memory_format": torch.contiguous_format})
    copy.meta = {key: node.meta[key] for key in ("stack_trace",) if key in node.meta}
    return copy


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)
