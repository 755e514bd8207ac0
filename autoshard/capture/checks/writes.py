"""Writes in place that a step could not repeat on shards as one process does."""

from __future__ import annotations

from collections import defaultdict
from typing import cast

import torch
from torch import nn
from torch.fx import Node as FxNode

from ...errors import CaptureError
from ..adapter import Trace
from ..ancestors import ancestors
from ..lines import at, line_of
from .effects import ReplacesBufferError


def refuse_writes(trace: Trace, model: nn.Module, input_names: list[str]) -> None:
    """Refuses writes to arguments, to buffers and parameters where more comes of it than a new value, and all writes in
    the backward.

    Raises:
        CaptureError: the step has one; the message names the tensor and the line.
    """
    _refuse_in_backward(trace, input_names)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    with_gradient = {name for kind, name in trace.placeholders if kind == "state tangent"} - parameters
    goes_back = any(kind == "gradient" for kind, _ in trace.outputs)
    written: dict[str, set[str]] = defaultdict(set)
    held = {
        name: node
        for node, (kind, name) in zip(trace.graph.find_nodes(op="placeholder"), trace.placeholders, strict=True)
        if kind in ("buffer", "parameter")
    }
    results = trace.graph.output_node().args[0]
    for value, (kind, detail) in zip(results, trace.outputs):  # type: ignore[arg-type]
        where = at(line_of(value)) if isinstance(value, FxNode) else ""
        if kind == "input mutation":
            name = input_names[detail]
            raise CaptureError(f"the forward writes into its argument {name}{where}; write {name} = {name}.clone()")
        if kind == "effect":
            raise CaptureError(
                f"the forward calls an operator that does more than compute its result{where}, such as raising an "
                "error that depends on data; use one that does not (torch.linalg.lu_factor_ex instead of lu_factor)"
            )
        if kind in ("mutation", "parameter mutation"):
            what = "buffer" if kind == "mutation" else "parameter"
            _check_write(f"{what} {detail}", value, where, detail in with_gradient, goes_back)
        if goes_back and kind in ("mutation", "parameter mutation", "replacement") and detail in held:
            _refuse_read_again(detail, held[detail], where)
        if kind == "replacement":
            _refuse_tied(model, detail, where)
        if kind in ("mutation", "replacement"):
            written[detail].add(kind)
    for name, kinds in written.items():
        if len(kinds) > 1:
            raise CaptureError(f"the forward both writes into the buffer {name} and replaces it; do one of the two")


def _refuse_in_backward(trace: Trace, input_names: list[str]) -> None:
    """Writes of a ``torch.autograd.Function``'s backward, or of a gradient's hook. Torch leaves them in the graph, and
    makes one of them and those of the forward into the same tensor.
    """
    placeholders = dict(zip(trace.graph.find_nodes(op="placeholder"), trace.placeholders, strict=True))
    tangents = {node for node, (kind, _) in placeholders.items() if kind == "tangent"}
    copies = trace.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = [(*placeholders[node.args[0]], node.args[1]) for node in copies if node.args[0] in placeholders]
    results = cast("tuple[FxNode | None, ...]", trace.graph.output_node().args[0])
    changed = [(*each, value) for each, value in zip(trace.outputs, results) if value and "mutation" in each[0]]
    if not tangents.isdisjoint(ancestors(value for *_, value in changed)):
        both = (each for each in changed if not tangents.isdisjoint(ancestors([each[-1]])))
        written += [(kind.removesuffix("mutation").strip() or "buffer", detail, value) for kind, detail, value in both]
    for kind, detail, value in written:
        name = f"argument {input_names[detail]}" if kind == "input" else f"{kind} {detail}"
        raise CaptureError(
            f"a backward of the model's own, or a hook of a gradient, writes into the {name}{at(line_of(value))}; a "
            "planned backward makes gradients alone. Write it in the forward, or outside of the step"
        )


def _check_write(name: str, value: object, where: str, with_gradient: bool, goes_back: bool) -> None:
    if with_gradient:
        raise CaptureError(
            f"the forward writes into the {name} what carries a gradient into the next step{where}; detach it "
            "(.detach()), or write under torch.no_grad()"
        )
    if goes_back and isinstance(value, FxNode) and value.meta.get("recompute"):
        raise CaptureError(
            f"the forward writes into the {name}{where} within torch.utils.checkpoint, where one process does "
            "so again in the backward; leave that part out of the checkpoint"
        )


def _refuse_read_again(name: str, held: FxNode, where: str) -> None:
    """What a checkpoint computes with again in the backward has its new value there in one process."""
    reading = next((user for user in held.users if user.meta.get("recompute")), None)
    if reading is not None:
        raise CaptureError(
            f"the forward writes into {name}{where}, which torch.utils.checkpoint computes with{at(line_of(reading))} "
            "and, in the backward of one process, computes with again as it is then; leave that part out of the "
            "checkpoint, or give it a copy (.clone())"
        )


def _refuse_tied(model: nn.Module, name: str, where: str) -> None:
    """A buffer that is known under two names would be replaced under one of them alone."""
    buffer = model.get_buffer(name)
    for other, tensor in model.named_buffers(remove_duplicate=False):
        if tensor is buffer and other != name:
            raise ReplacesBufferError(
                f"the forward replaces the buffer {name}{where}, which is also {other} and would no longer be; write "
                "into it in place (copy_)",
                name,
            )
