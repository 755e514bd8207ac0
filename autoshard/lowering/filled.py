"""The buffer of a bucket that tensors are written into as they are made.

A product writes where it is told to, so a gradient that is one need not be copied before it is reduced with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import fx

from .emitter import GraphEmitter, storages

aten = torch.ops.aten


class Filled:
    """A buffer that has one part for each member of a bucket, one behind the other.

    Args:
        sizes: how many numbers each part has.
    """

    def __init__(self, emitter: GraphEmitter, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._emitter = emitter
        self._buffer = emitter.call(aten.empty.memory_format, [1, sum(sizes)], dtype=dtype, device=device)
        self._parts = emitter.call(aten.split_with_sizes.default, self._buffer, list(sizes), 1)

    def place(self, member: int, shape: Sequence[int]) -> fx.Node:
        """Where a member is to be written, in its shape."""
        return self._emitter.call(aten.view.default, self._emitter.item(self._parts, member), list(shape))

    def complete(self, members: Sequence[fx.Node]) -> fx.Node:
        """The buffer with all members in it: what was written elsewhere is copied."""
        emitter, inside = self._emitter, storages(self._buffer).keys()
        others = [k for k, member in enumerate(members) if not storages(member).keys() & inside]
        if others:
            parts = [emitter.item(self._parts, k) for k in others]
            rows = [
                emitter.call(aten.view.default, members[k], [1, prod(members[k].meta["val"].shape)]) for k in others
            ]
            emitter.call(aten._foreach_copy_.default, parts, rows)
        return self._buffer
