"""Attention whose heads a model folds into its batch, (B * H, T, D), with both as dims of their own.

Of such a dim no block is some heads of all rows: the batch could be cut, heads could not. What lies between the view
that folds and the one that takes apart again is computed on (B, H, T, D), by the same functions of torch; products
become :func:`.matrix_products.product`. Whatever :mod:`.folded_calls` does not know gets its tensor folded, as it was.

The batch is known by its length alone; windows of rows (SAM's) by a view that folds just two dims.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..examples import example, note
from .folded_calls import HANDLERS, PRODUCTS, Apart, Call, Folds, Longer, may_be_written, writes


def keep_heads_apart(graph: fx.Graph, batch: int) -> None:
    """Rewrites a graph of torch functions in place: what is computed of a batch of that length with heads folded into
    it, if products of matrices are among that.
    """
    folds: Folds = {}
    calls: dict[fx.Node, Call] = {}
    for node in graph.nodes:
        handler = HANDLERS.get(node.target)
        call = handler(node, folds, batch) if handler and isinstance(example(node), (Tensor, tuple)) else None
        if call is not None:
            calls[node] = call
            if call.fold is not None:
                folds[node] = call.fold
    chosen = _with_products(graph, calls)
    apart: dict[fx.Node, fx.Node] = {}
    for node in filter(chosen.__contains__, list(graph.nodes)):
        _rewrite(graph, node, calls[node], apart)
    for node in reversed([node for node in apart if not node.users]):
        graph.erase_node(node)


def _with_products(graph: fx.Graph, calls: Mapping[fx.Node, Call]) -> set[fx.Node]:
    """Of these nodes those that hang together with a product, also by what is taken apart and folded again at once, but
    for what something writes into that others read.
    """
    leader = {node: node for node in calls}

    def lead(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    for node in calls:
        for given in node.all_input_nodes:
            if given in calls:
                leader[lead(given)] = lead(node)
    wanted = {lead(node) for node, call in calls.items() if call.function in PRODUCTS}
    written = (given for node in graph.nodes if writes(node) and node not in calls for given in node.all_input_nodes)
    wanted -= {lead(given) for given in written if given in calls and not may_be_written(given, calls[given])}
    return {node for node in calls if lead(node) in wanted}


def _rewrite(graph: fx.Graph, node: fx.Node, call: Call, apart: dict[fx.Node, fx.Node]) -> None:
    with graph.inserting_before(node):

        def added(function: Any, *args: Any, **kwargs: Any) -> fx.Node:
            method = isinstance(function, str)
            made = graph.call_method(function, args, kwargs) if method else graph.call_function(function, args, kwargs)
            made.meta = dict(node.meta)
            return made

        def given(arg: Any) -> Any:
            if isinstance(arg, Longer):
                return note(added(torch.unsqueeze, arg.node, arg.dim), example(arg.node).unsqueeze(arg.dim))
            if isinstance(arg, Apart):
                if arg.node in apart:
                    return apart[arg.node]
                return note(added(_taken_apart, arg.node, tuple(arg.fold)), _taken_apart(example(arg.node), arg.fold))
            if isinstance(arg, (tuple, list)):
                return (tuple if isinstance(arg, tuple) else list)(map(given, arg))
            return arg

        args, kwargs = tuple(map(given, call.args)), {key: given(arg) for key, arg in call.kwargs.items()}
        if call.fold is None:
            node.op, node.target = "call_method" if isinstance(call.function, str) else "call_function", call.function
            node.args, node.kwargs = args, kwargs
            return
        value = example(node)
        several = isinstance(value, tuple)
        values = tuple(_taken_apart(each, call.fold) for each in (value if several else (value,)))
        apart[node] = note(added(call.function, *args, **kwargs), values if several else values[0])
    node.op, node.target, node.args, node.kwargs = "call_function", _folded, (apart[node], call.fold.dim), {}


def _taken_apart(x: Tensor, fold: tuple[int, int, int]) -> Tensor:
    dim, *sizes = fold
    found: Tensor = x.unflatten(dim, sizes)
    return found


def _folded(x: Any, dim: int) -> Any:
    """A tensor, or several, with rows and heads as one dim."""
    return x.flatten(dim, dim + 1) if isinstance(x, Tensor) else tuple(each.flatten(dim, dim + 1) for each in x)
