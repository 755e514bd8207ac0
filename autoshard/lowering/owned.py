"""Gradients in memory that is theirs alone, and all of it.

A view keeps the whole storage that it looks at. Where a part of that is nobody's any more (padding that was cut off, a
neighbour that was cut to a shard behind the reduction), a gradient would hold it until it is set to None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from .emitter import GraphEmitter, storages
from .local_values import Storage

aten = torch.ops.aten


def owned(emitter: GraphEmitter, values: Sequence[fx.Node]) -> list[fx.Node]:
    """The values, which are views of one storage only where they take up all of it together; others are copied."""
    taken = Counter[Storage]()
    for value in values:
        (storage,), made = storages(value), value.meta["val"]
        taken[storage] += made.numel() * made.element_size()
    return [
        emitter.call(aten.clone.default, value)
        if any(taken[storage] < storage.size_bytes for storage in storages(value))
        else value
        for value in values
    ]
