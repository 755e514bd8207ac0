"""What libraries note of a kind of tensor when they first see one, in the world outside of a model."""

from __future__ import annotations

import sys

import torch
from torch import nn


def let_libraries_see_tensors() -> None:
    """Has einops, if somebody has imported it, find out what to do with tensors and parameters: it looks for that at
    the first call with either and keeps it in a dict of its own (``einops._backends``, 0.8), as no captured step may.
    """
    einops = sys.modules.get("einops")
    if einops is not None:
        for made in (torch.zeros(1), nn.Parameter(torch.zeros(1))):
            einops.rearrange(made, "a -> a")
