"""Numbers of pictures at places between their pixels, ``F.grid_sample``, with several dims in front.

Torch has one dim in front. Deformable attention folds its heads into that, and of it no block is some heads of several
rows. ``autoshard::sample`` keeps the dims apart, and each of them can be cut; it calls torch's kernel.

Shapes: a picture is (..., channels, height, width), and its places are (..., rows, columns, 2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import define, derive

aten = torch.ops.aten
_BEHIND = 3
"""Dims of a picture, and of its places, behind those in front."""
_MODES = ("bilinear", "nearest", "bicubic")
_PADDINGS = ("zeros", "border", "reflection")


def _as_batch(x: Tensor) -> Tensor:
    return x.flatten(0, -_BEHIND - 1).contiguous()


def _apart(x: Tensor, like: Tensor) -> Tensor:
    found: Tensor = x.contiguous().unflatten(0, like.shape[:-_BEHIND])
    return found


def _sample(image: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    """What each picture has at its places."""
    found: Tensor = aten.grid_sampler_2d.default(_as_batch(image), _as_batch(grid), mode, padding, align_corners)
    return _apart(found, image)


def _sample_shape(image: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool) -> Tensor:
    return image.new_empty((*image.shape[:-2], *grid.shape[-_BEHIND:-1]))


def _sample_backward(
    gradient: Tensor, image: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of pictures and places."""
    given = (_as_batch(gradient), _as_batch(image), _as_batch(grid), mode, padding, align_corners)
    of_image, of_grid = aten.grid_sampler_2d_backward.default(*given, [True, True])
    return _apart(of_image, image), _apart(of_grid, image)


def _gradient_shapes(
    gradient: Tensor, image: Tensor, grid: Tensor, mode: int, padding: int, align_corners: bool
) -> tuple[Tensor, Tensor]:
    return image.new_empty(image.shape), grid.new_empty(grid.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    image, grid, *ctx.how = inputs
    ctx.save_for_backward(image, grid)


def _back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    found = sample_backward(gradient, *ctx.saved_tensors, *ctx.how)
    wanted = (made if is_wanted else None for made, is_wanted in zip(found, ctx.needs_input_grad))
    return (*wanted, None, None, None)


sample = define("sample", _sample, _sample_shape)
sample_backward = define("sample_backward", _sample_backward, _gradient_shapes)
derive("sample", _back, _keep)


def sampled(
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """``F.grid_sample``, whose arguments these are, with several dims in front; under autocast torch's own, which knows
    what to cast.
    """
    if torch.is_autocast_enabled(input.device.type):
        pictures, places = _as_batch(input), _as_batch(grid)
        return _apart(F.grid_sample(pictures, places, mode, padding_mode, bool(align_corners)), input)
    made: Tensor = sample(input, grid, _MODES.index(mode), _PADDINGS.index(padding_mode), bool(align_corners))
    return made
