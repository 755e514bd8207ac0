"""What a model leaves in attributes of its modules (``self.attention = weights``), beside what it returns."""

from __future__ import annotations

from typing import Any

from torch import nn


def with_left(module: nn.Module, left: tuple[str, ...], result: Any) -> Any:
    """What the model returns, after its attributes have what the step leaves there.

    Args:
        left: the paths of these attributes.
        result: of the graph: a pair where there are any (:class:`autoshard.capture.CapturedGraph`).
    """
    if not left:
        return result
    returned, values = result
    for path, value in zip(left, values):
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, value)
    return returned
