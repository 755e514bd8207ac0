"""What a mask picks of a tensor, ``x[mask]``, where it was said how much: of each row of a batch as much, or in all.

A mask decides by its numbers how many elements it picks. Where a caller says that these are as many in every step
(:func:`autoshard.representative`), shapes are known, and every step looks whether it is so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..lines import at
from .library import define, derive

OTHERWISE = (
    "numbers of this step decide something else in the forward than those of the example did, which "
    "autoshard.representative says they do not: "
)
_MOST_SAID = 8


def _pick(x: Tensor, mask: Tensor, each: int, of_rows: bool, where: str = "") -> Tensor:
    """What a mask picks of each row (dim 0), of shape (rows, each, ...); of all rows as of one, if not ``of_rows``.

    Args:
        x: of the shape of the mask, and further dims.
        where: the line of the model, which the local graphs of a rank have, for the error.

    Raises:
        RuntimeError: the mask picks another number of some row. A GPU raises it when it gets there.
    """
    rows, beside = _rows(mask, of_rows)
    counts = mask.reshape(rows, beside).sum(1)
    of_what = "each row" if of_rows else "all"
    torch._assert_async((counts == each).all(), f"{OTHERWISE}there a mask picks {each} of {of_what}{at(where)}")
    return x[mask].reshape(rows, each, *x.shape[mask.dim() :])


def _picked_shape(x: Tensor, mask: Tensor, each: int, of_rows: bool, where: str = "") -> Tensor:
    return x.new_empty((_rows(mask, of_rows)[0], each, *x.shape[mask.dim() :]))


def _pick_backward(gradient: Tensor, mask: Tensor, of_rows: bool) -> Tensor:
    """Zeros with the gradient of what a mask picks in its places."""
    made = gradient.new_zeros((*mask.shape, *gradient.shape[2:]))
    made[mask] = gradient.flatten(0, 1)
    return made


def _unpicked_shape(gradient: Tensor, mask: Tensor, of_rows: bool) -> Tensor:
    return gradient.new_empty((*mask.shape, *gradient.shape[2:]))


def _rows(mask: Tensor, of_rows: bool) -> tuple[int, int]:
    """The number of rows, and of places in each."""
    return (mask.shape[0], math.prod(mask.shape[1:])) if of_rows else (1, mask.numel())


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, _, ctx.of_rows, *_ = inputs
    ctx.save_for_backward(mask)


def _back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    (mask,) = ctx.saved_tensors
    return pick_backward(gradient, mask, ctx.of_rows), None, None, None, None


pick = define("pick", _pick, _picked_shape)
pick_backward = define("pick_backward", _pick_backward, _unpicked_shape)
derive("pick", _back, _keep)


def _as_in_example(x: Tensor, others: Tensor, expected: Sequence[float], where: str = "") -> Tensor:
    """The first tensor again, once it is looked that no numbers are others than those expected.

    Args:
        others: how many numbers of a step are.
        expected, where: the numbers, and the line of the model, which the local graphs of a rank have, for the error.

    Raises:
        RuntimeError: some are. A GPU raises it when it gets there.
    """
    said = ", ".join(f"{value:g}" for value in expected[:_MOST_SAID]) + ", ..." * (len(expected) > _MOST_SAID)
    torch._assert_async((others == 0).all(), f"{OTHERWISE}there they are {said}{at(where)}")
    return x.clone()


def _same_shape(x: Tensor, others: Tensor, expected: Sequence[float], where: str = "") -> Tensor:
    return torch.empty_like(x)


as_in_example = define("as_in_example", _as_in_example, _same_shape)
derive("as_in_example", lambda ctx, gradient: (gradient, None, None, None), lambda ctx, inputs, output: None)
