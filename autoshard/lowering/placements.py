"""Our layouts as DTensor's placements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import layout as layouts
from ..errors import LayoutError
from ..layout import Layout, R, S
from .adapter import DTensorSpec, dtensor_of, in_equal_parts, made_spec, parts_of


def placements_of(layout: Layout) -> tuple[Placement, ...]:
    """One DTensor placement per mesh axis.

    Raises:
        LayoutError: a dim is cut in unequal parts, which no DTensor can be.
    """
    return tuple(map(_placement, layout))


def _placement(placement: layouts.Placement) -> Placement:
    if placement.parts:
        if set(placement.parts) != {1}:
            raise LayoutError(f"no DTensor can be {placement}: parts of a dim of a DTensor are equal")
        return in_equal_parts(placement.dim, len(placement.parts))
    match placement.kind:
        case "R":
            return Replicate()
        case "S":
            return Shard(placement.dim)
        case "P":
            return Partial(placement.reduce)


def layout_of(placements: Sequence[Placement]) -> Layout | None:
    """The layout of a DTensor without addends, None where it has them, or placements that are none of ours."""
    made = cuts_of(placements)
    others = any(ours == R and not isinstance(theirs, Replicate) for ours, theirs in zip(made, placements))
    # FSDP2 beside tensor parallelism means another thing by it: the axis behind cuts first
    mixed = any(p.parts and len(made.axes_of(p.dim)) > 1 for p in made)
    return None if others or mixed else made


def cuts_of(placements: Sequence[Placement]) -> Layout:
    """Where a DTensor is cut, as a layout: what lies along other axes in any other way is replicated."""
    return Layout(tuple(map(_cut, placements)))


def _cut(placement: Placement) -> layouts.Placement:
    if (parts := parts_of(placement)) is not None:
        return S(parts[0], (1,) * parts[1])
    return S(placement.dim) if isinstance(placement, Shard) else R


def as_dtensor(local: torch.Tensor, shape: tuple[int, ...], layout: Layout, mesh: DeviceMesh) -> DTensor:
    """A DTensor of a global shape from this rank's shard."""
    return dtensor_of(local, spec_of(local.dtype, shape, layout, mesh))


def spec_of(dtype: torch.dtype, shape: tuple[int, ...], layout: Layout, mesh: DeviceMesh) -> DTensorSpec:
    """What the DTensors of one dtype, shape and layout share. It belongs to this mesh, not to an equal one."""
    return made_spec(mesh, placements_of(layout), torch.Size(shape), strides_of(shape), dtype)


def readable(shard: torch.Tensor) -> torch.Tensor:
    """A shard as local graphs are written for: contiguous, and no lazy conjugate or negative of another tensor."""
    if shard.is_contiguous() and not (shard.is_conj() or shard.is_neg()):
        return shard  # nearly all are, and each of the operators below takes ten times as long as these questions
    return shard.resolve_conj().resolve_neg().contiguous()


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor: 2 x 3 x 4 has 12, 4, 1."""
    return tuple(prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))
