"""Shapes, and ways through a forward, that depend on numbers in a tensor. A plan is made without these numbers, so such
a forward is refused, with its line and what to write in its place.
"""

from __future__ import annotations

import operator
import re

from torch import nn
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.overrides import resolve_name

from ...errors import CaptureError
from ..dynamo.ways import begins
from ..examples import example, is_number, is_unknown
from ..lines import at, lines_in

_UNKNOWN = "which are unknown while planning"
_SAME = (
    "; where they come of arguments or buffers, and decide the same in every step, say so: "
    "autoshard.representative(tensor) of those arguments in the example, or of those buffers"
)
_PADDED = "pad to a fixed length and mask what is beyond the end"
_PASSED = "pass it to the forward as a Python number"
_SHAPE = (
    f"Keep the shape: choose by a mask of fixed size (torch.where(mask, x, 0.0)) or multiply by it, or {_PADDED}; a "
    f"length that the caller knows: {_PASSED}"
)
_NUMBER = (
    "Compute with the tensor itself (x * t in the place of x * t.item()); where it is a length, "
    f"{_PADDED}, or {_PASSED}"
)
_WAY = (
    "Compute both ways and choose (torch.where(condition, a, b)), or pass what decides to the forward as a Python value"
)
# What to do instead of the above about operators of these names.
_INSTEAD = {
    "nonzero": "Call torch.nonzero_static with a fixed size, or choose by the mask: torch.where(mask, x, 0.0)",
    "one_hot": "Give it num_classes",
    "repeat_interleave": "Give it output_size, the sum of the counts, as a Python number",
}
_NAMED = re.compile(r"([\w.]*\.\w+)")
_ASKED = re.compile(r"data-dependent expression (.+?) \(unhinted")
_AS_ARGUMENT = re.compile(r"got SymInt|not Sym(Int|Float|Bool)\b|failed to convert ")
_WHOLE_NUMBER = re.compile(r"\bu\d")
_BY_PYTHON = "in evaluate_expr)"  # what dynamo asks of a condition of the model's own


class ByNumbersError(CaptureError):
    """A shape, or a Python number, depends on numbers in a tensor."""


def refuse_shapes_by_numbers(model: nn.Module, module: GraphModule) -> None:
    """Refuses a forward in which a shape or a Python number is unknown.

    Args:
        model: what was traced, for its name.
        module: the forward as dynamo traced it, without checks of numbers.

    Raises:
        ByNumbersError: it takes a number out of a tensor, or calls an operator whose result has as many elements as
            numbers in a tensor say.
    """
    for graph in (inner.graph for inner in module.modules() if isinstance(inner, GraphModule)):
        for node in graph.nodes:
            value = example(node)
            if is_unknown(value):
                where = lines_in(node.meta.get("stack_trace") or "")
                why = _of_number() if is_number(value) else of_shape(_operation(node))
                raise ByNumbersError(f"{type(model).__name__} cannot be captured as one graph{at(where)}: {why}")


def refuse_ways_by_numbers(model: nn.Module, module: GraphModule) -> None:
    """Refuses a forward that goes on as if a mask picked something, where it may do something else if it does not.

    Raises:
        ByNumbersError: it does.
    """
    for graph in (inner.graph for inner in module.modules() if isinstance(inner, GraphModule)):
        for node in graph.find_nodes(op="call_function", target=begins):
            where = lines_in(node.meta.get("stack_trace") or "")
            raise ByNumbersError(f"{type(model).__name__} cannot be captured as one graph{at(where)}: {_of_way()}")


def why_by_numbers(text: str) -> str:
    """What is wrong where torch refuses a forward, with such a text, because numbers in a tensor would decide."""
    first = text.partition("\n")[0]
    if _AS_ARGUMENT.search(text) or any(
        word in first for word in ("specialized integer", "_local_scalar_dense", "tolist")
    ):
        return _of_number()
    if _is_argument(text):
        return _of_number()
    if "output shape" in first or first.startswith("aten."):
        named = _NAMED.search(first)
        return of_shape(named[1] if named else "an operator")
    return _of_way()


def _is_argument(text: str) -> bool:
    """Whether a function of torch asked for a number with a fraction: it is none of a shape, and no way of Python's."""
    asked = _ASKED.search(text)
    is_fraction = asked is not None and "zuf" in asked[1] and not _WHOLE_NUMBER.search(asked[1])
    return is_fraction and _BY_PYTHON not in text


def _of_way() -> str:
    return f"which way Python goes here, or a shape, depends on numbers in a tensor, {_UNKNOWN}. {_WAY}{_SAME}"


def _of_number() -> str:
    return (
        "here Python takes a number out of a tensor (.item(), int(t), t.tolist(), range(t), an index), and what "
        f"follows depends on it; it is unknown while planning. {_NUMBER}{_SAME}"
    )


def of_shape(operation: str) -> str:
    """What is wrong where numbers in a tensor say how large the result of an operation is."""
    remedy = next((instead for name, instead in _INSTEAD.items() if name in operation), _SHAPE)
    return f"the shape of what {operation} gives depends on numbers in a tensor, {_UNKNOWN}. {remedy}{_SAME}"


def _operation(node: FxNode) -> str:
    """What a node calls, as the model writes it."""
    if node.target is operator.getitem:
        return "indexing"
    if isinstance(node.target, str):
        return f".{node.target}()"
    name = resolve_name(node.target) or getattr(node.target, "__name__", str(node.target))
    return str(name).replace("torch.functional.", "torch.")
