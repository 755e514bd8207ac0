"""What one step keeps for its backward, and the watch over what of it the caller can reach.

torch itself would watch tensors that an operation saves for its backward. It does not see what the step saves: a
DTensor and its shard count changes separately, and results become DTensors behind the operators that make them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import BackwardError, InputError
from .adapter import saved_tensor_hooks
from .unread import Pending

_LATE = "in place after the forward (an optimizer's step changes parameters)"


@cache
def count_optimizer_steps() -> None:
    """From here on, every step of an optimizer counts as a change of the DTensors it trains, as it does of tensors.

    torch counts changes of a DTensor operator by operator, and misses operators on lists (``foreach=True``).
    """

    def count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            trained = [p for p in group["params"] if isinstance(p, DTensor) and p.grad is not None]
            torch.autograd.graph.increment_version(trained)

    register_optimizer_step_post_hook(count)


class Watched(NamedTuple):
    """Tensors of the caller's, torch's counts of the changes made to each so far, what they are called, and why another
    change is one too many.

    They matter to a backward through one of ``results``, or to any (None).
    """

    tensors: Sequence[torch.Tensor]
    versions: list[int]
    names: Sequence[str]
    objection: str
    results: frozenset[int] | None

    def changed(self) -> str | None:
        """What the first one is called that was changed since."""
        now = _versions(self.tensors)
        if now == self.versions:
            return None
        return next(name for name, before, after in zip(self.names, self.versions, now) if before != after)


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


class Kept:
    """What the forward of one step keeps for its backward; ``pending`` are the results that nobody has read yet."""

    def __init__(self) -> None:
        self._values: list[Any] = []  # None for those that a backward has used up
        self._watched: list[Watched] = []
        self._hooks = saved_tensor_hooks()
        self.pending: Pending | None = None

    def save(self, values: Sequence[torch.Tensor]) -> None:
        """Keeps what the backward reads. Where the caller has set hooks for that (checkpointing, offloading), it goes
        through them; as in torch, nobody watches then what they keep.
        """
        self._values = list(values) if self._hooks is None else [self._hooks[0](value) for value in values]

    def watch(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """From here on, no change in place of these tensors, which the backward reads, goes unseen.

        Raises:
            InputError: a tensor of inference mode, of which torch counts no changes.
        """
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.is_inference():
                raise InputError(
                    f"the {name} was made in torch.inference_mode, and the backward needs it; make it outside of that "
                    "mode, or clone it there"
                )
        self._add(names, tensors, ", and the backward needs its value from before", None)

    def watch_copy(self, result: int, name: str, tensor: torch.Tensor) -> None:
        """From here on, no change in place of a tensor that the model's result shares memory with goes unseen: the
        result has a copy, to which the change was not made.
        """
        why = f"; in the model result {result} shares its memory, here it is a copy"
        self._add((name,), (tensor,), why, frozenset({result}))

    def _add(
        self, names: Sequence[str], tensors: Sequence[torch.Tensor], objection: str, results: frozenset[int] | None
    ) -> None:
        if self._hooks is None:
            self._watched.append(Watched(tensors, _versions(tensors), names, objection, results))

    def take(self, used: Set[int], needed: Collection[int], spent: Collection[int]) -> list[Any]:
        """What a backward through the results ``used`` reads: the values at the positions ``needed``, and None at the
        others, in a list for the backward to empty.

        Those at the positions ``spent`` are gone from here: no other backward needs them.

        Raises:
            BackwardError: a backward has used them up, or they were changed since.
        """
        if any(self._values[k] is None for k in needed):
            raise BackwardError(
                "this step went backward before, and what it had saved is gone; call the module again, or call the "
                "first backward with retain_graph=True"
            )
        for watched in self._watched:
            matters = watched.results is None or watched.results & used
            if matters and (name := watched.changed()) is not None:
                raise BackwardError(
                    f"the {name} was changed {_LATE}{watched.objection}: change a clone of it (.clone()), or "
                    "change it after the backward"
                )
        unpack = self._hooks[1] if self._hooks is not None else lambda value: value
        taken = [unpack(value) if k in needed else None for k, value in enumerate(self._values)]
        self._values = [None if k in spent else value for k, value in enumerate(self._values)]
        return taken
