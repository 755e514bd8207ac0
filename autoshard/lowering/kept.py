"""What one step keeps for its backward, and the watch over what of it the caller can reach."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..errors import BackwardError, InputError


@dataclass(frozen=True)
class Watched:
    """A tensor of the caller's whose memory the backward reads, and torch's count of the changes made to it by then."""

    tensor: torch.Tensor
    version: int
    name: str


@dataclass
class Kept:
    """What the forward of one step keeps for its backward; ``values`` is None once a backward has used it up.

    torch itself would watch tensors that an operation saves for its backward. It does not see what the step saves: a
    DTensor and its shard count changes separately, and results become DTensors behind the operators that make them.
    """

    values: list[torch.Tensor] | None = field(default_factory=list)
    watched: list[Watched] = field(default_factory=list)

    def watch(self, name: str, *tensors: torch.Tensor) -> None:
        """From here on, no change of these tensors in place goes unseen.

        Raises:
            InputError: a tensor of inference mode, of which torch counts no changes.
        """
        for tensor in tensors:
            if tensor.is_inference():
                raise InputError(
                    f"{name} was made in torch.inference_mode, and the backward needs it; make it outside of that mode, "
                    "or clone it there"
                )
            self.watched.append(Watched(tensor, tensor._version, name))

    def check(self) -> None:
        """Checks that the backward can run.

        Raises:
            BackwardError: what it needs is gone, or was changed.
        """
        if self.values is None:
            raise BackwardError(
                "this step went backward before, and what it had saved is gone; call the module again, or call the "
                "first backward with retain_graph=True"
            )
        for watched in self.watched:
            if watched.tensor._version != watched.version:
                raise BackwardError(
                    f"{watched.name} was changed in place after the forward, and the backward needs its value from "
                    "before; change a clone of it, or change it after the backward (as an optimizer's step does)"
                )

    def take(self, retain: bool) -> list[torch.Tensor]:
        """The values in a list for the backward to empty; gone from here, unless they are retained."""
        assert self.values is not None
        values = list(self.values)
        if not retain:
            self.values, self.watched = None, []
        return values
