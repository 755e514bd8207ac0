"""The element types a plan can name and their sizes. Torch's names, without ``torch.``; this module is torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(
        ("bool", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
        + ("float8_e8m0fnu", "float4_e2m1fn_x2"),
        1,
    )
    | dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2)
    | dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4)
    | dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8)
    | {"complex128": 16}
)
"""Bytes per element. Source: torch 2.13, ``torch.dtype.itemsize``."""
