"""Annotations inside a model: ``x = autoshard.constrain(x, "dp:S(0) tp:R")``.

Outside of capture this is the tensor itself, at no cost. While a model is captured it is an operator of its own,
``autoshard::constrain``, which takes and gives any layout; the program holds it to the one that is written. Nothing
runs for it afterwards: the local graph of a rank goes on with the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import LayoutError
from .graph import CapturedGraph, Node

Entry = str | int | tuple[str | int, ...] | None
"""What cuts one dim in a partition spec."""

_marking = False  # dynamo guards on it: a model compiled outside of capture never sees the operator


def constrain(tensor: torch.Tensor, layout: str | tuple[Entry, ...]) -> torch.Tensor:
    """Says in a model how a tensor is to lie on the mesh; the planner keeps to it, everything else ignores it.

    The gradient is not constrained. Use the result; it is the same tensor, so do not write into it in place.

    Args:
        layout: as in plans, ``"dp:S(0) tp:R"`` (axes left out are replicated), or a partition spec, ``("dp", None)``.

    Raises:
        LayoutError: ``layout`` is neither a text nor a tuple. What it says is read when the model is planned.
    """
    if not isinstance(layout, str | tuple):
        raise LayoutError(f"constrain wants a layout such as 'dp:S(0) tp:R' or ('dp', None), got {layout!r}")
    if not _marking:
        return tensor
    marked: torch.Tensor = _constrain(tensor, layout if isinstance(layout, str) else repr(layout))
    return marked


@torch.library.custom_op("autoshard::constrain", mutates_args=())
def _constrain(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return tensor.clone()


@_constrain.register_fake
def _same_shape(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    return torch.empty_like(tensor)


def _pass_on(context: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient, None


_constrain.register_autograd(_pass_on)

CONSTRAIN = _constrain._opoverload


@contextmanager
def marking() -> Iterator[None]:
    """While it is entered, :func:`constrain` adds its operator to the captured graph; else it returns the tensor."""
    global _marking
    before, _marking = _marking, True
    try:
        yield
    finally:
        _marking = before


def annotated(graph: CapturedGraph) -> Iterator[tuple[int, Node, str]]:
    """The annotated tensors of a graph: node, and the layout as it was written."""
    for i, node in graph.of_kind("operator"):
        if node.op is CONSTRAIN:
            yield i, node, str(node.args[1])
