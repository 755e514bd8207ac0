"""A model in the mode of training or of evaluation, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Inside, the model and all its modules are in training, or in evaluation; afterwards each is as it was."""
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        module.training = training
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
