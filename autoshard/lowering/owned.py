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
    homes = [storage for value in values for (storage,) in [storages(value)]]
    taken = Counter[Storage]()
    for home, value in zip(homes, values):
        made = value.meta["val"]
        taken[home] += made.numel() * made.element_size()
    return [
        emitter.call(aten.clone.default, value) if taken[home] < home.size_bytes else value
        for home, value in zip(homes, values)
    ]
