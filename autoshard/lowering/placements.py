"""Our layouts as DTensor's placements."""

from __future__ import annotations

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from ..layout import Layout


def placements_of(layout: Layout) -> tuple[Placement, ...]:
    """One DTensor placement per mesh axis."""
    made = {"R": lambda p: Replicate(), "S": lambda p: Shard(p.dim), "P": lambda p: Partial(p.reduce)}
    return tuple(made[placement.kind](placement) for placement in layout)
