"""What a forward does besides computing its result: what of it a graph can hold, and why the rest is refused.

A buffer that is written in place or replaced becomes a result of the graph, a *mutation*. Any other change that a
forward makes to the world outside would happen once, while it is captured, or never: it is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_flatten, tree_structure

from ...errors import CaptureError
from ..arguments import same_constant
from ..dynamo.side_effects import SideEffect
from ..lines import at, line_of

_IF_ONCE = ". Where only the first call changes it, call the model once before planning"


@dataclass(frozen=True, eq=False)
class Leaves:
    """The results of a traced module (:mod:`..dynamo.observed`), leaf by leaf: FX nodes and constants."""

    result: tuple[Any, ...]
    before: tuple[Any, ...]
    after: tuple[Any, ...]
    arguments: tuple[Any, ...]
    grad_mode: bool
    left: tuple[Any, ...]
    arguments_structure: Any

    @classmethod
    def of(cls, module: GraphModule, out_spec: Any) -> Leaves:
        """Reads them off the output of a graph whose result has the structure ``out_spec``."""
        leaves = iter(module.graph.output_node().args[0])  # type: ignore[arg-type]
        specs = out_spec.children()
        result, before, after, arguments, (mode,), left = (tuple(islice(leaves, spec.num_leaves)) for spec in specs)
        return cls(result, before, after, arguments, mode, left, specs[3])


class ChangesModelError(CaptureError):
    """The forward changes attributes of the model, or does something under a lock, as what happens once does.

    ``left`` are the paths of attributes in which it leaves what it has computed.
    """

    left: tuple[str, ...] = ()


class ReplacesBufferError(CaptureError):
    """The forward puts a tensor in the place of the buffer ``name`` that cannot be one."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name


def left_attributes(effects: list[SideEffect]) -> tuple[str, ...]:
    """The paths of attributes of modules that a forward sets, where it changes nothing else and leaves tensors there.

    Raises:
        as :func:`refuse_side_effects`, for all other changes.
    """
    if all(effect.is_constant for effect in effects) or not all(effect.attribute for effect in effects):
        refuse_side_effects(effects)
    return tuple(sorted(effect.attribute for effect in effects))


def refuse_side_effects(effects: list[SideEffect], among: list[SideEffect] | None = None) -> None:
    """Refuses a forward that changes Python objects.

    Args:
        among: all that it changes, where ``effects`` are those of them that it reads before.

    Raises:
        ChangesModelError: it changes attributes of the model and nothing else.
        CaptureError: it changes something.
    """
    kind = ChangesModelError if all(effect.name.startswith("model.") for effect in effects) else CaptureError
    for effect in effects:
        then = "" if among is None else ", and reads before what another call has left there"
        error = kind(
            f"the forward changes {effect.name}{at(effect.line)}{then}; a captured step changes no Python state: it "
            "would happen once and never again. Keep it in a buffer (register_buffer), or return it from the forward "
            "and change it outside"
        )
        if isinstance(error, ChangesModelError):
            computed = (effect for effect in among or effects if not effect.is_constant)
            error.left = tuple(effect.attribute for effect in computed if effect.attribute)
        raise error


def refuse_stray_tensors(module: GraphModule, known: Collection[FxNode]) -> None:
    """Refuses tensors that a forward finds elsewhere than in its parameters, buffers and arguments.

    Raises:
        CaptureError: it reads one from a global variable, a closure or an object, or one that could not be made a
            buffer (:mod:`~autoshard.capture.checks.models`).
    """
    for node in module.graph.nodes:
        if node.op == "get_attr" and node not in known and _value(node) is not None:
            raise CaptureError(
                f"the forward reads a tensor that is neither a parameter nor a buffer nor an argument"
                f"{at(line_of(node))}; make it one: self.register_buffer(name, tensor) in __init__ "
                "(persistent=False keeps it out of checkpoints)"
            )


def refuse_other_arguments(module: GraphModule, leaves: Leaves, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a forward that adds to, removes from or replaces in the lists and dicts that it is called with.

    Raises:
        CaptureError: it does.
    """
    given = tree_flatten((args, kwargs))[0]
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    unchanged = leaves.arguments_structure == tree_structure((args, kwargs)) and all(
        left is inputs[k] or (not isinstance(leaf, torch.Tensor) and same_constant(left, leaf))
        for k, (left, leaf) in enumerate(zip(leaves.arguments, given))
    )
    if not unchanged:
        raise CaptureError(
            "the forward changes a list or dict that it is called with (for example by pop or item assignment); make a "
            "copy first: batch = dict(batch)"
        )


def refuse_other_modes(leaves: Leaves) -> None:
    """Refuses a forward that leaves gradients switched on or off.

    Raises:
        CaptureError: it does.
    """
    if leaves.grad_mode != torch.is_grad_enabled():
        raise CaptureError("the forward leaves gradients switched on or off; use `with torch.no_grad():` in it instead")


def replaced_buffers(module: GraphModule, leaves: Leaves, names: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """The buffers that stand for other tensors after the forward: their position among ``leaves.after``, and their FQN.

    Raises:
        ReplacesBufferError: the new tensor is of another shape or dtype, carries a gradient, or shares memory with a
            tensor that the caller can reach, so that later writes to one would show in the other.
    """
    outside = [node for node in module.graph.nodes if node.op in ("placeholder", "get_attr")]
    for k, (name, before, after) in enumerate(zip(names, leaves.before, leaves.after)):
        if after is before or (_storage(after) == _storage(before) and _same_view(after, before)):
            continue
        others = [*outside, *leaves.result, *leaves.after[:k], *leaves.after[k + 1 :]]
        if reason := _why_not(before, after, [node for node in others if isinstance(node, FxNode)]):
            line = line_of(after) if isinstance(after, FxNode) else ""
            raise ReplacesBufferError(f"the forward replaces the buffer {name}{at(line)}: {reason}", name)
        yield k, name


def _why_not(before: Any, after: Any, others: list[FxNode]) -> str:
    new, old = _value(after), _value(before)
    if new is None or old is None:
        return f"it is None before or after; give it its final shape in __init__{_IF_ONCE}"
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        return (
            f"it was {old.dtype}{list(old.shape)} and becomes {new.dtype}{list(new.shape)}; give it its final shape "
            f"and dtype in __init__{_IF_ONCE}"
        )
    if new.requires_grad:
        return "the new one carries a gradient into the next step; detach it (.detach()), or make it under no_grad()"
    if any(_storage(other) == _storage(after) for other in others):
        return "the new one shares memory with an argument, a result, a parameter or another buffer; copy it (.clone())"
    return ""


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, FxNode) else None
    return value if isinstance(value, torch.Tensor) else None


def _storage(node: Any) -> object:
    value = _value(node)
    return None if value is None else value.untyped_storage()._cdata


def _same_view(a: Any, b: Any) -> bool:
    first, second = _value(a), _value(b)
    assert first is not None and second is not None, "both have a storage"
    return (first.shape, first.stride(), first.storage_offset(), first.dtype) == (
        second.shape,
        second.stride(),
        second.storage_offset(),
        second.dtype,
    )
