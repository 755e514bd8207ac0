"""A model of the zoo: its name, and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autoshard

Example = tuple[nn.Module, dict[str, Any]]

MESHES = ("a=8", "a=2,b=4", "a=2,b=2,c=2")
UNEVEN = ("a=3", "a=6", "a=1,b=3")


@dataclass(frozen=True)
class Member:
    """A model that is planned and run.

    ``make`` gives the module and the keyword arguments of a call, whose result is the loss or has one (``.loss``).
    ``meshes`` are those that it is planned on. It computes in ``dtype``. What the numbers of the arguments named
    ``representative`` decide is the same in every step.
    """

    name: str
    make: Callable[[], Example]
    meshes: tuple[str, ...] = MESHES
    dtype: torch.dtype = torch.float64
    representative: tuple[str, ...] = ()

    def example(self) -> Example:
        """The model and the arguments of a call, always with the same numbers."""
        torch.manual_seed(0)
        model, given = self.make()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.1)
        given = {key: self._cast(value) for key, value in given.items()}
        for key in self.representative:
            autoshard.representative(given[key])
        return model.to(self.dtype), given

    def _cast(self, value: Any) -> Any:
        return value.to(self.dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
