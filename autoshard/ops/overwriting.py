"""Operators that give a tensor new values and read none of its old ones."""

from __future__ import annotations

import torch

aten = torch.ops.aten
_OVERWRITING = frozenset({aten.normal_, aten.uniform_, aten.exponential_, aten.fill_, aten.zero_, aten.copy_})


def overwrites(op: torch._ops.OpOverload) -> bool:
    """Whether an operator's first argument gets new values that do not depend on those it had."""
    return op.overloadpacket in _OVERWRITING
