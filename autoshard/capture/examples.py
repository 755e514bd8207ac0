"""What dynamo says of the nodes of its graph: a tensor without memory for each that gives one."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx

COMPUTED_ANEW: Mapping[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}
"""What computes anew what an operator of Python's writes into its first argument."""

_KEY = "example_value"
_PLACE = ("stack_trace", "nn_module_stack", "source_fn_stack")


def example(node: object) -> Any:
    """What a node gives; None where that is not known, or the argument is no node."""
    return node.meta.get(_KEY) if isinstance(node, fx.Node) else None


def tensor_of(node: object) -> Tensor | None:
    """The tensor that a node gives; None where it gives something else."""
    value = example(node)
    return value if isinstance(value, Tensor) else None


def shape_of(node: object) -> torch.Size:
    """The shape of the tensor that a node gives, of no dims where it gives something else."""
    value = tensor_of(node)
    return torch.Size() if value is None else value.shape


def numbers_of_example(node: object) -> Tensor | None:
    """The numbers that a node gives, where they are known."""
    numbers = getattr(example(node), "constant", None)
    return numbers if isinstance(numbers, Tensor) else None


def is_unknown(value: Any) -> bool:
    """Whether what a node gives is of a shape, or a number, that only a step would know."""
    if isinstance(value, (tuple, list)):
        return any(map(is_unknown, value))
    if isinstance(value, torch.Tensor):
        return not all(isinstance(length, int) for length in value.shape)
    return is_number(value)


def are_lengths(found: Iterable[Any], wanted: Iterable[Any]) -> bool:
    """Whether lengths are known, and these: to compare one that only a step would know is an error of torch's."""
    return all(type(a) is int and type(b) is int and a == b for a, b in zip_longest(found, wanted))


def is_number(value: Any) -> bool:
    """Whether it is a Python number that only a step would know."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def note(node: fx.Node, value: Any) -> fx.Node:
    """Says what a new node gives; the node itself."""
    node.meta[_KEY] = value
    return node


def new_call(like: fx.Node, function: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """A new call of a function, or of a method by its name, with what it gives, where the graph inserts nodes; noted to
    stand where another node does in the model.
    """
    made = like.graph.create_node(
        "call_method" if isinstance(function, str) else "call_function", function, args, kwargs
    )
    made.meta |= place_of(like)
    given, named = fx.map_arg((args, kwargs), example)
    called: Any = getattr(type(given[0]), function) if isinstance(function, str) else function
    fake: Any = next(value for value in map(tensor_of, like.graph.nodes) if value is not None)
    with fake.fake_mode:
        return note(made, called(*given, **named))


def place_of(node: fx.Node) -> dict[str, Any]:
    """What is noted of where a node stands in the model."""
    return {key: node.meta[key] for key in _PLACE if key in node.meta}


def name_of(node: fx.Node) -> str:
    """What a node calls, whether as a function, as a method, or by an operator of Python's."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(name).partition(".")[0]
