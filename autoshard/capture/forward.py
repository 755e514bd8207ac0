"""A model's forward as a graph of torch operators that changes nothing but buffers, ready for torch's own capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.utils._pytree import TreeSpec

from ..errors import CaptureError
from .by_numbers.as_in_example import hold_to_example, pick_as_in_example
from .by_numbers.expert_loops import take_loops_apart
from .by_numbers.fills import fill_by_masks
from .by_numbers.picked_rows import refuse_views_that_change
from .by_numbers.rows_of_masks import compute_of_all_rows
from .by_numbers.static_shapes import refuse_shapes_by_numbers, refuse_ways_by_numbers
from .by_numbers.unvalidated import leave_checks_out
from .checks.effects import (
    Leaves,
    left_attributes,
    refuse_other_arguments,
    refuse_other_modes,
    refuse_side_effects,
    refuse_stray_tensors,
    replaced_buffers,
)
from .dynamo.observed import MODEL, Observed
from .dynamo.side_effects import SideEffect
from .dynamo.tracing import Dynamo, autograd_function_apply, forward_graph, return_only
from .examples import tensor_of
from .graph import SameTensor
from .no_copies import without_copies
from .results import separate_results
from .taken_apart.take_apart import take_apart


@dataclass(frozen=True, eq=False)
class Forward:
    """The graph of a forward. ``module`` gives the ``results`` leaves of the model's result, then the tensors that take
    the place of the buffers ``replaced`` (FQNs). ``same`` are the results that are no new tensors, by position; an
    input among them is named by its own position. ``found`` is what dynamo noticed besides; ``has_custom_backward``
    says that a ``torch.autograd.Function`` is in it. ``batch_dim`` is the dim of the batch in the arguments.
    Where the model leaves tensors in attributes, ``left`` are the paths of these, and the result is a pair: what the
    model returns, and a list of what it leaves there.
    """

    module: GraphModule
    results: int
    out_spec: TreeSpec
    replaced: tuple[str, ...]
    same: dict[int, SameTensor]
    found: Dynamo
    has_custom_backward: bool
    batch_dim: int
    left: tuple[str, ...]


def forward_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
    """Traces a model whose tensors are fake.

    Raises:
        CaptureError: the forward does something that no graph can hold.
    """
    module, found, out_spec = forward_graph(Observed(model), args, kwargs)
    left = left_attributes(found.changed.side_effects)
    if found.changed.assigned or left:
        observed = Observed(model, tuple(found.changed.assigned), left)
        module, found, out_spec = _with_what_is_left(observed, args, kwargs, found.changed.side_effects)
    leave_checks_out(module.graph)
    without_copies(module.graph)
    pick_as_in_example(module)
    take_loops_apart(module)
    refuse_ways_by_numbers(model, module)
    refuse_views_that_change(module)
    fill_by_masks(module.graph)
    compute_of_all_rows(module.graph)
    refuse_shapes_by_numbers(model, module)
    known = _tensors_of(model, module)
    refuse_stray_tensors(module, known.keys())
    leaves = Leaves.of(module, out_spec)
    refuse_other_arguments(module, leaves, args, kwargs)
    refuse_other_modes(leaves)
    replaced = dict(replaced_buffers(module, leaves, tuple(found.changed.assigned)))
    result_spec, *_, left_spec = out_spec.children()
    if left:
        result_spec = TreeSpec(tuple, None, [result_spec, left_spec])
    result = hold_to_example(module, (*leaves.result, *leaves.left))
    return_only(module, result, [leaves.after[k] for k in replaced])
    seen = {node: value for node in module.graph.nodes if (value := tensor_of(node)) is not None}
    same = separate_results(module, known, seen)
    custom = any(node.target is autograd_function_apply for node in module.graph.nodes)
    dim = take_apart(module)
    return Forward(module, len(result), result_spec, tuple(replaced.values()), same, found, custom, dim, left)


def _with_what_is_left(
    observed: Observed, args: tuple[Any, ...], kwargs: dict[str, Any], effects: list[SideEffect]
) -> tuple[GraphModule, Dynamo, TreeSpec]:
    """The graph of a forward that also gives what it leaves in buffers and attributes.

    Raises:
        ChangesModelError: the forward reads such an attribute before it sets it, so that the next step would find what
            this one has left; or what it leaves there holds other objects than tensors and numbers.
    """
    try:
        module, found, out_spec = forward_graph(observed, args, kwargs)
    except CaptureError:
        refuse_side_effects(effects)
        raise
    refuse_side_effects([effect for effect in effects if found.reads_attribute(effect.attribute)], effects)
    return module, found, out_spec


def _tensors_of(model: nn.Module, module: GraphModule) -> dict[FxNode, SameTensor]:
    """The parameters, buffers and inputs among the nodes of a graph."""
    kinds: dict[Any, Literal["parameter", "buffer"]]
    kinds = {f"{MODEL}{name}": "parameter" for name, _ in model.named_parameters(remove_duplicate=False)}
    kinds |= {f"{MODEL}{name}": "buffer" for name, _ in model.named_buffers(remove_duplicate=False)}
    tensors = {}
    for position, node in enumerate(node for node in module.graph.nodes if node.op == "placeholder"):
        if tensor_of(node) is not None:
            tensors[node] = SameTensor("input", str(position))
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target in kinds:
            tensors[node] = SameTensor(kinds[node.target], node.target.removeprefix(MODEL))
    return tensors
