"""Arguments of an example, and buffers, whose numbers decide what those of every step decide: shapes, and which way
Python goes.

A forward may go by numbers that it is called with: as many patches as a mask picks, the sizes of pictures, whether any
row is padded; or by those in a buffer, as how much a convolution pads. What such numbers decide has to be the same in
every step of a plan; who knows that it is says so with :func:`representative`. The forward is then captured as the
example decides, and every step looks whether its own numbers decide the same (:mod:`.as_in_example`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

_MARK = "_autoshard_representative"
_OF_ARGUMENTS = "_autoshard_of_arguments"
MOST = 1 << 26
"""Elements of the largest tensor whose numbers are computed while a model is captured."""


def representative(tensor: Tensor) -> Tensor:
    """Says of an example argument, or a buffer, that what its numbers decide in the forward is the same in every step.

    Mark it where a plan is made and where it is applied: in the example arguments, or once the model has the dtype and
    the device that it stays with; batches need no mark. Only what is computed of marked tensors alone, not of
    parameters, may decide. A step in which it would decide something else raises a RuntimeError that says what.

    Args:
        tensor: an example argument or a buffer, with numbers (not on the meta device).

    Returns:
        The same tensor.

    Raises:
        ValueError: it is no tensor, or has no numbers.
    """
    if not isinstance(tensor, Tensor):
        raise ValueError(f"representative wants an example tensor, got {tensor!r}")
    if tensor.is_meta:
        raise ValueError("representative wants a tensor with numbers, got one on the meta device")
    setattr(tensor, _MARK, True)
    return tensor


def is_representative(value: object) -> bool:
    """Whether an argument or buffer was marked with :func:`representative`."""
    return isinstance(value, Tensor) and getattr(value, _MARK, False) is True


def any_representative(model: nn.Module, *arguments: Any) -> bool:
    """Whether any tensor in arguments, or buffer of the model, was."""
    return any(map(is_representative, (*tree_leaves(arguments), *model.buffers())))


def numbers_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of a marked tensor, on the CPU, in the dtype in which the model is called with it."""
    return tensor.detach().to(device="cpu", dtype=dtype, copy=True)


def of_arguments(tensor: Tensor) -> None:
    """Notes of a tensor without memory that its numbers are known, and come of a marked one."""
    setattr(tensor, _OF_ARGUMENTS, True)


def is_of_arguments(value: object) -> bool:
    """Whether they are, and do."""
    return isinstance(value, Tensor) and getattr(value, _OF_ARGUMENTS, False) is True
