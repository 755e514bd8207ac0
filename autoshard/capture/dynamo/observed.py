"""The module that is traced in place of a model: it calls the model and also returns what the call left behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

MODEL = "model."  # what stands before the names of the model's tensors


class Observed(nn.Module):
    """Calls a model. Whoever traces it learns which tensors the model put in the place of buffers, whether it changed
    the containers it was called with, and whether it left gradients switched on or off.
    """

    def __init__(self, model: nn.Module, buffers: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.model = model
        self.paths = tuple(tuple(name.split(".")) for name in buffers)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Returns the model's result, the buffers before and after, the arguments, and the grad mode left behind."""
        before = [_reached(self.model, path) for path in self.paths]
        result = self.model(*args, **kwargs)
        after = [_reached(self.model, path) for path in self.paths]
        return result, before, after, (args, kwargs), torch.is_grad_enabled()


def _reached(owner: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        owner = getattr(owner, name)
    return owner
