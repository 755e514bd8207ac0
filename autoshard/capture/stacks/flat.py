"""Capture that does not slow down with depth: a stack of alike blocks is captured short, and repeated.

Two things say that this is what a capture of the whole model would give. The short graph: its blocks in the middle are
the same (:mod:`.repeat`). And the whole model's Python, which is run once on tensors without memory: what it calls,
operator by operator, is what the short model calls, repeated in the same way. Where either fails, or what differs from
block to block is read (an index that decides what a block does), the model is captured whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import nn

from ...errors import CaptureError
from ..adapter import Trace
from ..fake_run import FakeRun, fake_run, seen
from ..graph import CapturedGraph
from ..left import put_back
from .block_guards import BlockGuards
from .blocks import FEWEST, Stack, shortened, stacks_of
from .repeat import NotPeriodicError, Repeated, repeated

Captured: TypeAlias = tuple[CapturedGraph, Trace]


def captured_flat(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    capture: Callable[[], Captured],
    dtype: torch.dtype | None = None,
    run: FakeRun | None = None,
) -> CapturedGraph | None:
    """The graph of a model that has stacks; None where it has none, or is to be captured whole.

    Args:
        capture: captures the model as it is when called.
        dtype: what it casts floating parameters and arguments to.
        run: of the model as it is, with blocks that name what runs in them, if there was one.
    """
    stacks = tuple(stacks_of(model, FEWEST))
    if not stacks:
        return None
    try:
        with shortened(stacks):
            graph, traced = capture()
            if any(_is_in_blocks(f"model.{path}", stacks) for path in traced.left):
                return None
            with put_back(model, traced.left):
                short_run = fake_run(model, args, kwargs, dtype, stacks)
        if traced.has_custom_backward or any(stack.differing & traced.reads for stack in stacks):
            return None
        families = {} if traced.guards is None else traced.guards.families
        if not all(is_ones_own and _is_in_blocks(name, stacks) for name, is_ones_own in families.items()):
            return None  # what the short model reads of these is not all that the deep one does
        with put_back(model, traced.left):
            deep_run = run or fake_run(model, args, kwargs, dtype, stacks)
        if deep_run.backwards:  # of which no operator says what they do
            return None
        if short_run.elsewhere or deep_run.elsewhere:  # of which nobody knows whether they are the same ones
            return None
        short = short_run.nodes
        for stack in stacks:
            graph = repeated(graph, stack)
            short = Repeated(short, stack).nodes
    except (CaptureError, NotPeriodicError):  # a capture of the whole model says what is wrong, or does without it
        return None
    if list(map(seen, short)) != list(map(seen, deep_run.nodes)):
        return None
    guards = traced.guards and BlockGuards(traced.guards, model, stacks)
    if guards is not None and guards.broken() is not None:
        return None  # what holds for the blocks that were captured need not hold for all, though all do the same
    return replace(graph, guards=guards)


def _is_in_blocks(name: str, stacks: Sequence[Stack]) -> bool:
    """Whether what dynamo has a name for (``model.blocks.2.tables``) is a block's own."""
    return any(re.search(rf"\b{re.escape(f'model.{stack.path}'.rstrip('.'))}\.\d", name) for stack in stacks)
