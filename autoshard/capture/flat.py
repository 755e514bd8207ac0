"""Capture that does not slow down with depth: a stack of alike blocks is captured short, and repeated.

Two things say that this is what a capture of the whole model would give. The short graph: its blocks in the middle are
the same (:mod:`autoshard.capture.repeat`). And the whole model's Python, which is run once on tensors without memory:
what it calls, operator by operator, is what the short model calls, repeated in the same way. Where either fails, or
what differs from block to block is read (an index that decides what a block does), the model is captured whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ..errors import CaptureError
from .adapter import Trace, run_on_fakes
from .block_guards import BlockGuards
from .blocks import Stack, shortened, stacks_of
from .graph import CapturedGraph, Node, Ref, TensorMeta
from .repeat import NotPeriodicError, Repeated, repeated

FEWEST = 8
"""Blocks from which on a short capture, and the two runs that check it, take less time than a whole one."""

Captured: TypeAlias = tuple[CapturedGraph, Trace]


def captured_flat(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    capture: Callable[[], Captured],
    dtype: torch.dtype | None = None,
) -> CapturedGraph | None:
    """The graph of a model that has stacks; None where it has none, or is to be captured whole.

    Args:
        capture: captures the model as it is when called.
        dtype: what it casts floating parameters and arguments to.
    """
    stacks = tuple(stacks_of(model, FEWEST))
    if not stacks:
        return None
    try:
        with shortened(stacks):
            graph, traced = capture()
            short = _run(model, args, kwargs, stacks, dtype)
        if traced.has_custom_backward or any(stack.differing & traced.reads for stack in stacks):
            return None
        deep = _run(model, args, kwargs, stacks, dtype)
        for stack in stacks:
            graph = repeated(graph, stack.path, stack.size)
            short = Repeated(short, stack.path, stack.size).nodes
    except (CaptureError, NotPeriodicError):  # a capture of the whole model says what is wrong, or does without it
        return None
    if list(map(_seen, short)) != list(map(_seen, deep)):
        return None
    return replace(graph, guards=traced.guards and BlockGuards(traced.guards, model, stacks))


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stacks: Sequence[Stack],
    dtype: torch.dtype | None,
) -> tuple[Node, ...]:
    """What a call of the model runs: a node for each operator, named by the block that it runs in.

    Raises:
        NotPeriodicError: the forward cannot be run so.
    """
    run = _Run()
    with ExitStack() as hooks:
        for stack in stacks:
            for index, block in stack.container.named_children():
                name = f"{stack.path}.{index}".removeprefix(".")
                hooks.callback(block.register_forward_pre_hook(run.entering(name)).remove)
                hooks.callback(block.register_forward_hook(run.leaving).remove)
        try:
            run_on_fakes(model, args, kwargs, lambda leaves: run.start(model, leaves), dtype)
        except Exception as error:  # it is the user's code that runs: on fakes it may do whatever it likes
            raise NotPeriodicError(f"the forward cannot be run on fake tensors: {error}") from error
    return tuple(run.nodes)


class _Run:
    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._refs: dict[int, Ref] = {}
        self._alive: list[Any] = []  # so that no other tensor gets the identity of one that is known
        self._blocks = [""]
        self._counts: dict[str, int] = {}

    def entering(self, block: str) -> Callable[..., None]:
        """A hook for before a block runs."""

        def enter(*_: Any) -> None:
            self._blocks.append(block)

        return enter

    def leaving(self, *_: Any) -> None:
        """A hook for after a block has run."""
        self._blocks.pop()

    def start(self, model: nn.Module, leaves: Sequence[Any]) -> Callable[..., None]:
        """Notes the tensors that are there before the call."""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._add(Node(name, "parameter", "forward", (TensorMeta(tuple(tensor.shape), tensor.dtype),)), [tensor])
        for k, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                self._add(Node(f"input.{k}", "input", "forward", ()), [leaf])
        return self._ran

    def _ran(self, op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        block = self._blocks[-1]
        count = self._counts[block] = self._counts.get(block, -1) + 1
        results = [value for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor)]
        metas = tuple(TensorMeta(tuple(value.shape), value.dtype) for value in results)
        named = tuple(self._noted(list(kwargs.items())))
        self._add(Node(f"{block}/{count}", "operator", "forward", metas, op, self._noted(args), named), results)

    def _noted(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._refs:
                raise NotPeriodicError("the forward reads a tensor from elsewhere")
            return self._refs[id(value)]
        return tuple(map(self._noted, value)) if isinstance(value, (tuple, list)) else value

    def _add(self, node: Node, results: Sequence[torch.Tensor]) -> None:
        self._refs |= {id(value): Ref(len(self.nodes), k) for k, value in enumerate(results)}
        self._alive += results
        self.nodes.append(node)


def _seen(node: Node) -> tuple[object, ...]:
    return node.name, node.outputs, node.op, repr((node.args, node.kwargs))
