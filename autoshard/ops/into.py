"""Operators that can write what they make into memory that they are given.

Of some that torch has such a form of, the form makes a new tensor all the same, and copies it: not these.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten

INTO: dict[Any, Any] = {
    aten.add.Tensor: aten.add.out,
    aten.bmm.default: aten.bmm.out,
    aten.mm.default: aten.mm.out,
}
"""Of each the form that takes the same arguments, and ``out`` beside them."""
