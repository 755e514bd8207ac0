"""Where a traced forward turns gradients off for a while and computes nothing that could have one."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..dynamo.ways import begins, ends, is_among
from ..examples import example, name_of
from .masks import written_by


def leave_out_idle_modes(graph: fx.Graph) -> None:
    """Erases where gradients are turned off for a while in which nothing is computed that could have one: as around the
    places of an expert's tokens.
    """
    is_on, off, is_idle = torch.is_grad_enabled(), None, True
    for node in list(graph.nodes):
        if not is_mode(node):
            is_idle = is_idle and _has_no_gradient(node)
            continue
        turned = node.args[0] if name_of(node) == "_set_grad_enabled" else None
        if off is not None and is_idle and turned is True:
            graph.erase_node(off)
            graph.erase_node(node)
            off, is_on = None, True
        else:
            off = node if turned is False and is_on else None
            is_on = is_on if turned is None else turned
        is_idle = True


def _has_no_gradient(node: fx.Node) -> bool:
    """Whether a node neither gives tensors of floating point nor writes into any."""
    if node.target in (begins, ends, is_among):
        return True
    every = [example(node), *map(example, written_by(node))]
    return not any(_is_floating(value) for value in every)


def _is_floating(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_is_floating, value))
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def is_mode(node: fx.Node) -> bool:
    """Whether a node sets what is computed with, and how, from there on."""
    return name_of(node).startswith(("_set_grad", "_enter_", "_exit_")) or "inference_mode" in name_of(node)
