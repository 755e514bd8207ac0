"""Holds a step to what the numbers of representative arguments and buffers decided while the model was captured.

``x[mask]`` becomes an operator that knows how much the mask picks, and looks whether it picks that much: of every row
of a batch as much, where it is so in the example, so that the batch can be cut; else in all. Numbers that Python took
out of a tensor, and ways that it went, stand in the graph as they were; they are compared, and the result of the model
is there only where they are equal.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx import GraphModule

from ..dynamo.what_decides import decides
from ..examples import example, name_of, new_call, numbers_of_example, shape_of, tensor_of
from ..lines import at, lines_in
from ..operators.picks import as_in_example, pick
from .masks import mask_of, placed_by, with_what_is_in_front
from .representative import is_of_arguments
from .static_shapes import ByNumbersError

_PLACES = ("nonzero", "where")


def pick_as_in_example(module: GraphModule) -> None:
    """Rewrites what masks pick that are made of representative arguments: ``x[mask]``, ``x.masked_select(mask)``,
    ``mask.nonzero()``, ``torch.where(mask)``, ``x[mask] = y``.
    """
    graph = module.graph
    given = _made_of_arguments(graph)
    for node in list(graph.nodes) if given else ():
        if node.op not in ("call_function", "call_method") or not node.args:
            continue
        with graph.inserting_before(node):
            made = _Pick(node, given).made()
        if made is not None:
            node.replace_all_uses_with(made)
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if name_of(node) in _PLACES and not node.users and node.args and node.args[0] in given:
            graph.erase_node(node)


def hold_to_example(module: GraphModule, results: Sequence[Any]) -> list[Any]:
    """The leaves of a result, of which one is there only if the numbers of a step decide what those of the example did.

    Raises:
        ByNumbersError: numbers decide what a checkpointed function does, or nothing is there that could wait for them.
    """
    graph, held, decided = module.graph, list(results), defaultdict[str, list[fx.Node]](list)
    for inner in (each for each in module.modules() if isinstance(each, GraphModule) and each is not module):
        for node in inner.graph.find_nodes(op="call_function", target=decides):
            raise ByNumbersError(
                f"numbers of a representative argument decide within a checkpointed function{_line(node)}; a step "
                "cannot check them there: let them decide in front of it"
            )
    for node in graph.find_nodes(op="call_function", target=decides):
        decided[_line(node)].append(node)
    if not decided:
        return held
    own = [k for k, leaf in enumerate(held) if isinstance(leaf, fx.Node) and leaf.op.startswith("call")]
    own = [k for k in own if tensor_of(held[k]) is not None]
    if not own:
        raise ByNumbersError(
            f"numbers of a representative argument decide{next(iter(decided))}, but the forward returns no tensor that "
            "could wait until they are checked"
        )
    for nodes in decided.values():
        least = min(own, key=lambda k: math.prod(shape_of(held[k])))
        held[least] = _held(graph, held[least], nodes)
        for node in nodes:
            graph.erase_node(node)
    _erase_numbers(graph)
    return held


def _held(graph: fx.Graph, leaf: fx.Node, nodes: Sequence[fx.Node]) -> fx.Node:
    """A leaf of the result that is there only if tensors have the numbers that they had."""
    first = {node.args: node for node in reversed(nodes)}
    others: list[fx.Node] = []
    for (x, how, numbers), node in first.items():
        with graph.inserting_before(node):  # as it is there: it may be written into later
            others.append(_others(node, x, how, numbers))
    with graph.inserting_before(graph.output_node()):
        every = new_call(nodes[0], "sum", new_call(nodes[0], torch.stack, others))
        expected = [number for _, _, numbers in first for number in numbers]  # type: ignore[union-attr]
        return new_call(nodes[0], as_in_example, leaf, every, expected)


def _others(node: fx.Node, x: Any, how: Any, numbers: Any) -> fx.Node:
    """How many of the numbers that a tensor has where a node stands are others than those expected."""
    if how == "numbers":
        wanted = new_call(node, torch.tensor, list(numbers), dtype=torch.float64)
        wanted = new_call(node, "reshape", wanted, tuple(shape_of(x)))
    else:
        (wanted,) = numbers
    if how == "count":
        x = new_call(node, "sum", new_call(node, "ne", x, 0))
    return new_call(node, "sum", new_call(node, "ne", x, wanted))


def _erase_numbers(graph: fx.Graph) -> None:
    """Erases what took numbers out of tensors, which nothing reads."""
    for node in reversed(list(graph.nodes)):
        if name_of(node) in ("item", "sym_int", "sym_float", "tolist") and not node.users:
            graph.erase_node(node)


def _made_of_arguments(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose numbers are known, and come of representative arguments."""
    return {node for node in graph.nodes if is_of_arguments(example(node)) and numbers_of_example(node) is not None}


def _line(node: fx.Node) -> str:
    return at(lines_in(node.meta.get("stack_trace") or ""))


class _Pick:
    """What a node picks by a mask of known numbers, made in front of it."""

    def __init__(self, node: fx.Node, given: set[fx.Node]) -> None:
        self._node, self._given = node, given

    def made(self) -> fx.Node | None:
        """What stands in its place; None where it picks otherwise."""
        node, name = self._node, name_of(self._node)
        x: Any = node.args[0]
        if name == "nonzero" and len(node.args) == 1 and not node.kwargs and x in self._given:
            return self._call(torch.stack, [self._column(x, dim) for dim in range(len(shape_of(x)))], -1)
        if len(node.args) < 2:
            return None
        if name == "getitem" and name_of(x) in _PLACES and isinstance(node.args[1], int):
            dim, places = node.args[1], placed_by(node)
            return self._column(places, dim) if places in self._given else None
        front, index = with_what_is_in_front(node.args[1])
        if name == "setitem":
            return self._written(x, front, index, node.args[2])
        mask: Any = index if name == "masked_select" else mask_of(index)
        if mask not in self._given or not all(type(each) is int for each in front):
            return None
        if shape_of(x)[len(front) :][: len(shape_of(mask))] != shape_of(mask):
            return None
        is_picked = name == "getitem" or (name == "masked_select" and shape_of(x) == shape_of(mask))
        return self._picked(self._part(x, front), mask) if is_picked else None

    def _part(self, x: fx.Node, front: tuple[Any, ...]) -> fx.Node:
        return self._call(operator.getitem, x, front) if front else x

    def _picked(self, x: fx.Node, mask: Any) -> fx.Node:
        """``x[mask]``."""
        numbers = numbers_of_example(mask)
        assert numbers is not None
        counts = numbers.reshape(len(numbers), -1).sum(1)
        of_rows = bool(len(counts)) and bool((counts == counts[0]).all())
        each = int(counts[0]) if of_rows else int(counts.sum())
        return self._call("flatten", self._call(pick, x, mask, each, of_rows), 0, 1)

    def _written(self, x: fx.Node, front: tuple[Any, ...], index: Any, new: Any) -> fx.Node | None:
        """``x[mask] = new`` and ``x[:, 0, mask] = new``, of a number for each that is written."""
        mask, whole, value = mask_of(index), tensor_of(x), tensor_of(new)
        if mask not in self._given or whole is None or value is None:
            return None
        of, lead = shape_of(mask), sum(type(each) is not int for each in front)
        shape = whole[front].shape
        if len(value.shape) <= lead or (*value.shape[:lead], *of, *value.shape[lead + 1 :]) != (*shape,):
            return None
        beside, count = self._call("reshape", mask, (*of, *(1,) * (value.dim() - lead - 1))), float(value.shape[lead])
        fitting = self._call(as_in_example, new, _others(self._node, mask, "count", (count,)), [count])
        return self._call("masked_scatter_", self._part(x, front), beside, self._call("to", fitting, whole.dtype))

    def _column(self, mask: Any, dim: int) -> fx.Node:
        """The places of a mask along a dim: of those of all elements the ones that it picks."""
        shape = shape_of(mask)
        along = tuple(size if d == dim else 1 for d, size in enumerate(shape))
        numbers = self._call("reshape", self._call(torch.arange, shape[dim]), along)
        return self._picked(self._call("expand", numbers, tuple(shape)), mask)

    def _call(self, function: Any, *args: Any) -> fx.Node:
        return new_call(self._node, function, *args)
