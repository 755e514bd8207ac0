"""``masked_scatter`` of some rows of a batch, from what belongs to these rows.

``x.masked_scatter(mask, source)`` gives the elements that the mask picks, in row-major order, those of ``source`` one
after the other: features of pictures take the places of their tokens. A rank with some rows, and as large a part of the
source, gives the same numbers wherever the mask picks as many elements of these rows as the part has. That is a matter
of numbers, so it is looked at in every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .library import define

UNFIT = (
    "masked_scatter: the mask of a rank's rows picks more or fewer elements than the rank has of the source. Cut along "
    "the batch, both must be as many, as with equally many pictures in every row; for others make the plan with the "
    "constraint 'forbid OPERATOR AXIS:S(0)' on the masked_scatter of the model"
)


def _filled_rows(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """``x.masked_scatter(mask, source)``.

    Raises:
        RuntimeError: the mask picks more or fewer elements than the source has. A GPU raises it when it gets there.
    """
    picked = mask.sum() * (x.numel() // max(mask.numel(), 1))
    torch._assert_async(picked == source.numel(), UNFIT)
    return x.masked_scatter(mask, source)


def _shape(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return torch.empty_like(x)


filled_rows = define("filled_rows", _filled_rows, _shape)
