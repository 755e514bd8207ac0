"""How autoshard's own operators are defined: ``torch.ops.autoshard``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("autoshard", "FRAGMENT")


def define(name: str, function: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """An operator that runs a function; torch reads its schema off the signature, which that for its shapes shares.

    ``torch.library.custom_op`` does the same and more (it prepares for derivatives and looks for writes), and its calls
    take ten times as long.
    """
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autoshard::{name}", shapes, lib=_LIBRARY)
    return getattr(torch.ops.autoshard, name).default


def derive(name: str, backward: Callable[..., Any], keep: Callable[..., None]) -> None:
    """Gives an operator its derivative: ``keep`` saves for ``backward``, as in ``torch.library.register_autograd``."""
    torch.library.register_autograd(f"autoshard::{name}", backward, setup_context=keep, lib=_LIBRARY)
