"""The private torch APIs that capture needs, all in this file (torch 2.11 to 2.13).

``trace`` turns a model on fake tensors into one joint forward and backward FX graph. Source of the recipe: torch's own
``aot_export_joint_with_descriptors`` (torch/_functorch/aot_autograd.py).
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import nn
from torch._decomp import get_decompositions
from torch._dynamo.functional_export import _dynamo_graph_capture_for_export
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export._trace import _restore_state_dict
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from .annotation import marking
from .autocast import check_autocast_within
from .graph import SameTensor
from .lines import line_of
from .results import separate_results

aten = torch.ops.aten

# Losses divide by the number of targets. As sums and counts of the whole batch they add up exactly when it is cut.
_DECOMPOSED = [
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.mse_loss,
    aten.mse_loss_backward,
    aten.smooth_l1_loss,
    aten.smooth_l1_loss_backward,
    aten.huber_loss,
    aten.huber_loss_backward,
    aten.binary_cross_entropy,
    aten.binary_cross_entropy_backward,
    aten.binary_cross_entropy_with_logits,
]


@dataclass(frozen=True, eq=False)
class Trace:
    """The joint graph, with a descriptor ``(kind, detail)`` for each placeholder and each output.

    Kinds of placeholder: parameter (FQN), buffer (FQN), input (position), tangent (position).
    Kinds of output: output (position), gradient (FQN), mutation (FQN), none. ``same`` are the results that are no new
    tensors, by position; an input among them is named by its own position.
    """

    graph: torch.fx.Graph
    placeholders: tuple[tuple[str, Any], ...]
    outputs: tuple[tuple[str, Any], ...]
    same: dict[int, SameTensor]
    out_spec: TreeSpec


def trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    """Captures one joint graph of a model. Its parameters, and the tensors in args and kwargs, may be on any device.

    The model is left as it was; no memory is allocated for its tensors.
    """
    mode = FakeTensorMode()
    convert = _Faker(mode)
    with convert.fake_module(model), marking(), ExitStack() as stack:
        fake_args, fake_kwargs = tree_map(convert, (args, kwargs))
        module = _dynamo_graph_capture_for_export(model)(*fake_args, **fake_kwargs)
        _restore_state_dict(model, module)
        _check_autocast_within(module.graph)
        same = separate_results(module, *_tensors_of(model, module.graph))
        decompositions: Any = get_decompositions(_DECOMPOSED)
        # the backward is called outside of autocast
        stack.enter_context(functorch_config.patch({"backward_pass_autocast": "off"}))
        joint = aot_export_joint_with_descriptors(
            stack, module, fake_args, fake_kwargs or None, decompositions=decompositions
        )
    graph = joint.graph_module.graph
    placeholders = tuple(_placeholder(node.meta["desc"]) for node in graph.nodes if node.op == "placeholder")
    output = graph.output_node()
    outputs = tuple(_output(desc) for desc in tree_flatten(output.meta["desc"])[0])
    return Trace(graph, placeholders, outputs, same, joint.out_spec)


def model_stack(error: Exception) -> str:
    """The frames of the model in which dynamo met an error, as a traceback prints them; empty for other errors."""
    return "".join(traceback.format_list(getattr(error, "real_stack", None) or []))


class _Faker:
    """Turns tensors into fake CPU tensors of the same shape, one for each distinct tensor, so that ties stay ties."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._memo: dict[int, torch.Tensor] = {}

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self._memo:
            with self._mode:
                fake = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
                if isinstance(value, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=value.requires_grad)
            self._memo[id(value)] = fake
        return self._memo[id(value)]

    @contextmanager
    def fake_module(self, model: nn.Module) -> Iterator[None]:
        """Replaces the parameters and buffers of a model by fake ones, and puts the real ones back."""
        tables: list[dict[str, Any]] = [table for m in model.modules() for table in (m._parameters, m._buffers)]
        kept = [dict(table) for table in tables]
        try:
            for table in tables:
                for key, tensor in list(table.items()):
                    table[key] = self(tensor)
            yield
        finally:
            for table, real in zip(tables, kept):
                table.update(real)


def _check_autocast_within(graph: torch.fx.Graph) -> None:
    nodes = list(graph.nodes)
    for k, node in enumerate(nodes):
        if node.target is torch.amp.autocast_mode._enter_autocast:
            device_type, _, is_enabled, *_ = node.args
            # dynamo knows no line of the region itself; the first operator in it has one
            lines = (line_of(inner) for inner in nodes[k:])
            check_autocast_within(str(device_type), bool(is_enabled), next(filter(None, lines), ""))


def _tensors_of(
    model: nn.Module, graph: torch.fx.Graph
) -> tuple[dict[torch.fx.Node, SameTensor], dict[torch.fx.Node, torch.Tensor]]:
    """The parameters, buffers and inputs among the nodes of dynamo's graph, and what dynamo saw each node give."""
    seen = {node: node.meta.get("example_value") for node in graph.nodes}
    values = {node: value for node, value in seen.items() if isinstance(value, torch.Tensor)}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    leaves = {}
    for position, node in enumerate(node for node in graph.nodes if node.op == "placeholder"):
        if node in values:
            leaves[node] = SameTensor("input", str(position))
    for node in values:
        if node.op == "get_attr" and node.target in parameters | buffers:
            leaves[node] = SameTensor("parameter" if node.target in parameters else "buffer", str(node.target))
    return leaves, values


def _placeholder(desc: Any) -> tuple[str, Any]:
    match type(desc).__name__:
        case "ParamAOTInput":
            return "parameter", desc.target
        case "BufferAOTInput":
            return "buffer", desc.target
        case "PlainAOTInput":
            return "input", desc.idx
        case "TangentAOTInput":
            return "tangent", desc.output.idx
    raise NotImplementedError(f"the captured graph has an input of a kind autoshard does not know: {desc}")


def _output(desc: Any) -> tuple[str, Any]:
    match type(desc).__name__:
        case "PlainAOTOutput":
            return "output", desc.idx
        case "GradAOTOutput":
            inner = desc.grad_of
            return ("gradient", inner.target) if type(inner).__name__ == "ParamAOTInput" else ("none", None)
        case "InputMutationAOTOutput":
            return "mutation", desc.mutated_input.target
        case "NoneType":
            return "none", None
    raise NotImplementedError(f"the captured graph has a result of a kind autoshard does not know: {desc}")
