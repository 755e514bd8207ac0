"""``x[k]`` and ``x == k`` by a tensor that holds a number which stands in the forward, as by the number: what is picked
is a row.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..examples import example, name_of, new_call, numbers_of_example, shape_of, tensor_of
from .masks import memory_of, written_into
from .representative import is_of_arguments


def pick_by_known_numbers(graph: fx.Graph) -> None:
    """Rewrites what a traced forward compares with one such number, and what it picks by it along the first dim. What
    was a tensor of its own is a view of the whole then, so what is written into stays as it is.
    """
    for node in graph.nodes:
        if name_of(node) == "eq" and len(node.args) == 2 and (number := _number(node.args[1])) is not None:
            x, other = tensor_of(node.args[0]), shape_of(node.args[1])
            if x is not None and not x.is_floating_point() and x.dim() >= len(other):
                node.update_arg(1, number)
    written = written_into(graph)
    for node in list(graph.find_nodes(op="call_function", target=operator.getitem)):
        x, index = node.args
        first, *rest = index if isinstance(index, tuple) else (index,)
        number = _number(first)
        if number is None or any(isinstance(each, fx.Node) for each in rest):
            continue
        if memory_of(x) in written or memory_of(node) in written:
            continue
        with graph.inserting_before(node):
            row = new_call(node, operator.getitem, x, (number, *rest) if rest else number)
            made = row if not shape_of(first) else new_call(node, "unsqueeze", row, 0)
        for user in list(node.users):
            if made is not row and name_of(user) == "squeeze" and user.args[1:] == (0,) and not user.kwargs:
                user.replace_all_uses_with(row)
                graph.erase_node(user)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        if not made.users and made is not row:
            graph.erase_node(made)


def _number(index: Any) -> int | None:
    """The one number of an index that is known; None of any other."""
    numbers = numbers_of_example(index)
    if numbers is None or numbers.dtype != torch.int64 or tuple(numbers.shape) not in ((), (1,)):
        return None
    return None if is_of_arguments(example(index)) else int(numbers)
