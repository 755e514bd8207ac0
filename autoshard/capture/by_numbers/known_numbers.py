"""Numbers that stand in the forward, and what is computed of them alone: ``torch.tensor([[1, 4, 4]] * 8)`` for the size
of each image, the lengths and windows that a vision tower makes of it, ``t.tolist()``, ``mask.nonzero()``.

A forward may go by them, as they are the same in every step. What only they have made, of a shape that they decide, is
written into the graph, as later stages know shapes alone.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from ..dynamo.dynamo_errors import depends_on_numbers
from ..lines import at, line_of
from ..operators.constant import LARGEST
from .static_shapes import ByNumbersError, of_shape

aten = torch.ops.aten

_BY_NUMBERS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_PICKING = (aten.nonzero.default, aten.masked_select.default)
_INDEXING = (aten.index.Tensor, aten.index_put.default)
MADE_OF_NOTHING = frozenset(
    getattr(packet, name)
    for packet in (aten.arange, aten.zeros, aten.ones, aten.full, aten.linspace, aten.eye, aten.scalar_tensor)
    for name in packet.overloads()
    if "out" not in name and "names" not in name
)
"""Operators that read no tensor, and make the same in every step."""


def decided_by_numbers(error: Exception) -> bool:
    """Whether an error says that a forward goes by numbers in a tensor."""
    return isinstance(error, ByNumbersError) or depends_on_numbers(error)


def write_down_what_is_known(graph: fx.Graph, told: Mapping[fx.Node, Tensor]) -> None:
    """Has a traced graph hold the numbers that operators give whose shape other numbers decide, where these are known,
    and the places at which a known mask is true instead of the mask.

    Args:
        told: the numbers of inputs that are representative. What they decide here every step checks.
    """
    known = _Known(graph, told)
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if any(tag in _BY_NUMBERS for tag in node.target.tags):
            for result in [user for user in node.users if user.target is operator.getitem] or [node]:
                numbers = None if node.target in _PICKING and known.is_told(result) else known.of(result)
                if isinstance(numbers, Tensor):
                    result.replace_all_uses_with(known.written(result, numbers))
        if node.target in _INDEXING:
            x, indices, *rest = node.args
            node.args = (x, [place for index in indices for place in known.places(index)], *rest)


def refuse_what_numbers_size(graph: fx.Graph) -> None:
    """Refuses a traced graph in which numbers that a step would have decide how large a tensor is, although the example
    says how large it is there: no operator holds a step to that.

    Raises:
        ByNumbersError: there is one, with its line.
    """
    for node in graph.nodes:
        op = node.target
        if not isinstance(op, torch._ops.OpOverload) or not node.users:
            continue
        is_sized = torch.Tag.dynamic_output_shape in op.tags and op not in _INDEXING
        if is_sized or _is_sized_by_mask(node):
            raise ByNumbersError(f"the forward cannot be captured{at(line_of(node))}: {of_shape(str(op))}")


def _is_sized_by_mask(node: fx.Node) -> bool:
    """Whether a mask says how many elements an operator picks, or is given."""
    if node.target not in _INDEXING:
        return False
    masks = [each.meta["val"] for each in node.args[1] if isinstance(each, fx.Node)]  # type: ignore[union-attr]
    if not any(mask.dtype in (torch.bool, torch.uint8) for mask in masks):
        return False
    if node.target is aten.index.Tensor:
        return True
    x, given = (node.args[k].meta["val"] for k in (0, 2))  # type: ignore[union-attr]
    behind = given.dim() - (x.dim() - sum(mask.dim() if mask.dtype is torch.bool else 1 for mask in masks))
    return bool(behind > 0 and given.shape[0] != 1)


class _Known:
    """What nodes of a graph give that are made of numbers in it alone, or told of inputs, on the CPU."""

    def __init__(self, graph: fx.Graph, given: Mapping[fx.Node, Tensor]) -> None:
        self._graph = graph
        self._known: dict[fx.Node, Any] = {**given}
        self._waiting = deque[fx.Node]()
        self._could_be, self._told = set(given), set(given)
        for node in graph.nodes:
            if _is_small(node) and (_makes_the_same(node) if node.op == "call_function" else node.op == "get_attr"):
                if self._could_be.issuperset(node.all_input_nodes):
                    self._could_be.add(node)
                    self._waiting.append(node)
                    if not self._told.isdisjoint(node.all_input_nodes):
                        self._told.add(node)

    def is_told(self, node: fx.Node) -> bool:
        """Whether what a node gives is made of what is told of inputs."""
        return node in self._told

    def of(self, node: fx.Node) -> Any:
        """What a node gives in every step; None where that is not known."""
        while node in self._could_be and node not in self._known and self._waiting:
            self._run(self._waiting.popleft())
        return self._known.get(node)

    def _run(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            value = getattr(self._graph.owning_module, str(node.target))
            self._known[node] = value if isinstance(value, Tensor) else None
        elif all(self._known.get(given) is not None for given in node.all_input_nodes):
            args, kwargs = fx.map_arg((node.args, node.kwargs), self._known.get)
            if "device" in kwargs:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            op: Any = node.target
            self._known[node] = op(*args, **kwargs)

    def places(self, index: fx.Node | None) -> list[fx.Node | None]:
        """The numbers, a tensor for each dim, that pick what an index picks."""
        mask = None if index is None or self.is_told(index) else self.of(index)
        if index is None or not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            return [index]
        return [self.written(index, numbers) for numbers in mask.nonzero().unbind(1)]

    def written(self, node: fx.Node, numbers: Tensor) -> fx.Node:
        """A node that holds numbers, in front of another one."""
        module: Any = self._graph.owning_module
        name = f"_known_{len(self._known)}"
        module.register_buffer(name, numbers.detach().clone())
        with self._graph.inserting_before(node):
            made = self._graph.get_attr(name)
        made.meta |= {**node.meta, "val": getattr(module, name)}
        self._known[made] = numbers
        return made


def _is_small(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.numel() <= LARGEST


def _makes_the_same(node: fx.Node) -> bool:
    """Whether a call makes the same of the same, and reads numbers or none."""
    op: Any = node.target
    if op is operator.getitem or not isinstance(op, torch._ops.OpOverload):
        return op is operator.getitem
    is_random = op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags
    return not is_random and (bool(node.all_input_nodes) or op in MADE_OF_NOTHING)
