"""Random tensors to check a rule on, three kinds, so that no rule holds by the luck of one.

========  ==========================  ===================  ==================  =====================
kind      floating, complex           integers             booleans            shows
========  ==========================  ===================  ==================  =====================
positive  0.5 to 1.5                  any dim's index      fair coins          logarithms, roots
normal    normal                      any dim's index      a single True       either sign
ties      whole numbers from -4 to 4  0 and 1              a single False      equal values, zeros
========  ==========================  ===================  ==================  =====================

Integers that may be indices are indices of every dim that is longer than 1, as some kernels write where an index says,
whatever it says. Those of an operator that works element by element are positive among the positive and of either sign
among the others.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..capture import Node, TensorMeta, map_refs

Kind = Literal["positive", "normal", "ties"]
KINDS: tuple[Kind, ...] = ("positive", "normal", "ties")

_LARGEST_TIE = 4


def sample(
    metas: tuple[TensorMeta, ...], kind: Kind, generator: torch.Generator, elementwise: bool = False
) -> tuple[torch.Tensor, ...]:
    """One tensor on the CPU for each shape and dtype."""
    sizes = [size for meta in metas for size in meta.shape if size > 1]
    low, high = min(sizes, default=2), max(sizes, default=2)
    indices = {"positive": (0, low), "normal": (0, low), "ties": (0, 2)}
    numbers = {"positive": (1, high + 1), "normal": (-high, high), "ties": (-2, 3)}
    span = (numbers if elementwise else indices)[kind]
    return tuple(_tensor(meta, kind, span, generator) for meta in metas)


def _tensor(meta: TensorMeta, kind: Kind, span: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    if meta.dtype is torch.bool:
        return _booleans(meta.shape, kind, generator)
    if meta.dtype.is_complex:
        halves = [_reals(meta.shape, meta.dtype.to_real(), kind, generator) for _ in range(2)]
        return torch.complex(*halves)
    if meta.dtype.is_floating_point:
        return _reals(meta.shape, meta.dtype, kind, generator)
    return torch.randint(*span, meta.shape, generator=generator, device="cpu").to(meta.dtype)


def _reals(shape: tuple[int, ...], dtype: torch.dtype, kind: Kind, generator: torch.Generator) -> torch.Tensor:
    if kind == "positive":
        return torch.rand(shape, generator=generator, dtype=dtype, device="cpu") + 0.5
    if kind == "normal":
        return torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
    return torch.randint(-_LARGEST_TIE, _LARGEST_TIE + 1, shape, generator=generator, device="cpu").to(dtype)


def _booleans(shape: tuple[int, ...], kind: Kind, generator: torch.Generator) -> torch.Tensor:
    if kind == "positive":
        return torch.randint(0, 2, shape, generator=generator, device="cpu").bool()
    others = kind == "ties"
    tensor = torch.full(shape, others, device="cpu")
    if tensor.numel():
        tensor.view(-1)[torch.randint(tensor.numel(), (), generator=generator, device="cpu")] = not others
    return tensor


def apply(node: Node, values: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Runs the operator on whole tensors; one entry per result."""
    supply = iter(values)
    args = map_refs(node.args, lambda _: next(supply))
    kwargs = {key: map_refs(value, lambda _: next(supply)) for key, value in node.kwargs}
    assert node.op is not None
    result = node.op(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)
