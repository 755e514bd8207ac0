"""Llama-3-8B in other sizes of a step, and in float32: what docs/fit.md asks about, ``examples/sizes.py:s8192``."""

from __future__ import annotations

from torch import Tensor

from llama import Llama, llama3_8b  # the file beside this one

Example = tuple[Llama, tuple[Tensor, Tensor]]


def s4096(batch: int = 8) -> Example:
    """Eight rows of 4,096 tokens, or as many as ``search --batch`` asks for."""
    return llama3_8b(batch, 4096)


def s8192() -> Example:
    """Eight rows of 8,192 tokens."""
    return llama3_8b(8, 8192)


def s16384() -> Example:
    """Eight rows of 16,384 tokens."""
    return llama3_8b(8, 16384)


def b16() -> Example:
    """Sixteen rows of 4,096 tokens."""
    return llama3_8b(16, 4096)


def float32() -> Example:
    """Eight rows of 4,096 tokens, with parameters in float32."""
    model, batch = llama3_8b(8, 4096)
    return model.float(), batch
