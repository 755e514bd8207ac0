"""The module that is traced in place of a model: it calls the model and also returns what the call left behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MODEL = "model."  # what stands before the names of the model's tensors


class Observed(nn.Module):
    """Calls a model. Whoever traces it learns which tensors the model put in the place of buffers, whether it changed
    the containers it was called with, whether it left gradients switched on or off, and what it left in attributes.
    """

    def __init__(self, model: nn.Module, buffers: tuple[str, ...] = (), attributes: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.model = model
        self.paths = tuple(tuple(name.split(".")) for name in buffers)
        self.attributes = tuple(tuple(name.split(".")) for name in attributes)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns the model's result, the buffers before and after, the arguments, the grad mode left behind, and what
        is in the attributes then.
        """
        before = [_reached(self.model, path) for path in self.paths]
        result = self.model(*args, **kwargs)
        after = [_reached(self.model, path) for path in self.paths]
        left = [_reached(self.model, path) for path in self.attributes]
        return result, before, after, (args, kwargs), torch.is_grad_enabled(), left


def _reached(owner: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        owner = getattr(owner, name)
    return owner
