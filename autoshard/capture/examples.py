"""What dynamo says of the nodes of its graph: a tensor without memory for each that gives one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

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


def note(node: fx.Node, value: Any) -> fx.Node:
    """Says what a new node gives; the node itself."""
    node.meta[_KEY] = value
    return node


def note_made(node: fx.Node, mode: Any) -> fx.Node:
    """Says what a new call gives, of what its arguments give; the node itself.

    Args:
        mode: that of the tensors without memory.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), example)
    function: Any = getattr(type(args[0]), node.target) if isinstance(node.target, str) else node.target
    with mode:
        return note(node, function(*args, **kwargs))


def place_of(node: fx.Node) -> dict[str, Any]:
    """What is noted of where a node stands in the model."""
    return {key: node.meta[key] for key in _PLACE if key in node.meta}


def name_of(node: fx.Node) -> str:
    """What a node calls, whether as a function, as a method, or by an operator of Python's."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return str(name).partition(".")[0]
