"""A look at each step whether the longest sequence is as long as all are padded."""

from __future__ import annotations

import torch
from torch import Tensor

from ..lines import at
from .library import define

SHORTER = (
    "pad_packed_sequence: the longest sequence of this step is shorter than the padded sequences that were packed, and "
    "gives fewer steps in one process, where a plan has as many in every step. Say how many: total_length=x.size(1) "
    "(x.size(0) without batch_first)"
)


def _as_long(lengths: Tensor, missing: Tensor, where: str = "") -> Tensor:
    """Lengths of sequences again, once it is looked that the longest misses no step.

    Args:
        where: the line of the model, which the local graphs of a rank have, for the error.

    Raises:
        RuntimeError: it does. A GPU raises it when it gets there.
    """
    torch._assert_async((missing == 0).all(), SHORTER + at(where))
    return lengths.clone()


def _same_shape(lengths: Tensor, missing: Tensor, where: str = "") -> Tensor:
    return torch.empty_like(lengths)


as_long = define("as_long", _as_long, _same_shape)
