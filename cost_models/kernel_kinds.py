"""The kinds of kernels that are priced apart. The only list: profiles, prices and operators take it from here."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

OpKind: TypeAlias = Literal[
    "matmul",
    "attention",
    "convolution",
    "normalization",
    "softmax",
    "reduction",
    "pointwise",
    "indexing",
    "copy",
    "optimizer",
    "view",
]
OP_KINDS: tuple[str, ...] = get_args(OpKind)
