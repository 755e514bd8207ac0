"""Numbers that stand in the forward, and what is computed of them alone: ``torch.tensor([[1, 4, 4]] * 8)`` for the size
of each image, the lengths and windows that a vision tower makes of it, ``t.tolist()``, ``mask.nonzero()``.

A forward may go by them, as they are the same in every step. What only they have made, of a shape that they decide, is
written into the graph, as later stages know shapes alone.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from .constant import LARGEST
from .dynamo import depends_on_numbers
from .static_shapes import ByNumbersError

aten = torch.ops.aten

_BY_NUMBERS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
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


def write_down_what_is_known(graph: fx.Graph) -> None:
    """Has a traced graph hold the numbers that operators give whose shape other numbers decide, where these are known,
    and the places at which a known mask is true instead of the mask.
    """
    known = _Known(graph)
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        if any(tag in _BY_NUMBERS for tag in node.target.tags):
            for result in [user for user in node.users if user.target is operator.getitem] or [node]:
                numbers = known.of(result)
                if isinstance(numbers, Tensor):
                    result.replace_all_uses_with(known.written(result, numbers))
        if node.target in _INDEXING:
            x, indices, *rest = node.args
            node.args = (x, [place for index in indices for place in known.places(index)], *rest)


class _Known:
    """What nodes of a graph give that are made of numbers in it alone."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._found: dict[fx.Node, Any] = {}

    def of(self, node: fx.Node) -> Any:
        """What a node gives in every step, a tensor on the CPU; None where that is not known."""
        if node not in self._found:
            self._found[node] = self._run(node)
        return self._found[node]

    def _run(self, node: fx.Node) -> Any:
        op: Any = node.target
        if node.op == "get_attr":
            value = getattr(self._graph.owning_module, op)
            return value if isinstance(value, Tensor) else None
        if node.op != "call_function" or not (node.all_input_nodes or op in MADE_OF_NOTHING):
            return None
        if op is not operator.getitem and (op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags):
            return None
        if any(self.of(given) is None for given in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.of)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        made = op(*args, **kwargs)
        return made if not isinstance(made, Tensor) or made.numel() <= LARGEST else None

    def places(self, index: fx.Node | None) -> list[fx.Node | None]:
        """The numbers, a tensor for each dim, that pick what an index picks."""
        is_mask = index is not None and index.meta["val"].dtype is torch.bool
        mask = self.of(index) if index is not None and is_mask else None
        if index is None or mask is None:
            return [index]
        return [self.written(index, numbers) for numbers in mask.nonzero().unbind(1)]

    def written(self, node: fx.Node, numbers: Tensor) -> fx.Node:
        """A node that holds numbers, in front of another one."""
        module: Any = self._graph.owning_module
        name = f"_known_{len(self._found)}"
        module.register_buffer(name, numbers.detach().clone())
        with self._graph.inserting_before(node):
            made = self._graph.get_attr(name)
        made.meta |= {**node.meta, "val": getattr(module, name)}
        self._found[made] = numbers
        return made
