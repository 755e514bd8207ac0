"""Numbers of representative arguments that decide shapes, or which way Python goes, noted in dynamo's graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch._dynamo.symbolic_convert import tls
from torch.fx import Node as FxNode

from ...errors import CaptureError
from ..by_numbers.representative import is_of_arguments
from ..examples import example, name_of, place_of
from ..operators.constant import LARGEST
from .variables import stack_here

Decided = Literal["number", "count", "numbers"]
"""What of a tensor decided: its one number, how many of its elements are not zero, or all of its numbers."""


def decides(tensor: torch.Tensor, how: Decided, expected: tuple[float, ...]) -> None:
    """Stands in a graph of dynamo's where numbers of a representative argument decide shapes, or which way Python goes:
    those that are expected of a tensor that comes of it.
    """


def note_decided(tensor: torch.Tensor, how: Decided, expected: Sequence[float]) -> None:
    """Has the graph that dynamo is making, if it is, say what decides. Where torch has looked at a tensor that is in no
    graph, all numbers of those decide that it was made of.

    Raises:
        CaptureError: these are too many.
    """
    translator = getattr(tls, "current_tx", None)
    if translator is None:
        return
    nodes = iter(reversed(translator.output.current_tracer.graph.nodes))
    last = next(nodes)
    if name_of(last) == "item" and (whole := _listed(last.args[0])) is not None:
        note_decided_by(whole, "numbers", tuple(example(whole).constant.double().flatten().tolist()))
        return
    maker = next((node for node in (last, *last.all_input_nodes, *nodes) if example(node) is tensor), None)
    if maker is not None:
        note_decided_by(maker, how, tuple(map(float, expected)))
        return
    marked = [node for node in last.all_input_nodes if is_of_arguments(example(node))]
    if not marked:
        raise CaptureError(f"{name_of(last)} goes by numbers of a representative argument that no step can check")
    for node in marked:
        value: Any = example(node)
        if value.constant is None or value.numel() > LARGEST:
            raise CaptureError(
                f"{name_of(last)} goes by more numbers of a representative argument than a step can check"
            )
        note_decided_by(node, "numbers", tuple(value.constant.double().flatten().tolist()))


def _listed(element: Any) -> FxNode | None:
    """The tensor whose numbers are written down as a list; None where one is taken alone. Dynamo says nothing of the
    elements of a list.
    """
    if not isinstance(element, FxNode) or example(element) is not None:
        return None
    while example(element) is None:
        element = element.args[0]
    return element  # type: ignore[no-any-return]


def note_decided_by(node: FxNode, how: Decided, expected: tuple[float, ...]) -> None:
    """Has the graph of a node say what of the tensor that it gives decides."""
    noted = node.graph.call_function(decides, (node, how, expected))
    noted.meta |= place_of(node) | {"stack_trace": stack_here()}
