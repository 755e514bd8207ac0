"""What programs take from the fuzzer: pieces that are too long to be written into each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Reversed(torch.autograd.Function):
    """A function with a backward of its own: the gradient is turned around."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -0.5 * grad


class Around(nn.Module):
    """A module around the model, as a job has it; ``how`` calls the model with its arguments."""

    def __init__(self, inner: nn.Module, how: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = inner
        self.how = how

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.how(self.inner, *args, **kwargs)


def directly(inner: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return inner(*args, **kwargs)


def checkpointed(inner: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs the model again for the backward."""
    return checkpoint(inner, *args, use_reentrant=False, **kwargs)


def with_other_parameters(inner: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Calls the model on parameters twice as large."""
    other = {name: parameter * 2 for name, parameter in inner.named_parameters()}
    return torch.func.functional_call(inner, other, args, kwargs)


def with_saved_tensors_moved(inner: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Lets a hook see every tensor that is saved for the backward."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return inner(*args, **kwargs)
