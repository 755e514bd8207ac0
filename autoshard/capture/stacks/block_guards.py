"""Guards of a model of which a short one was captured: blocks are put, two at a time, where the short one has them."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from torch import nn

from ..dynamo.guards import Guards
from .blocks import Stack, shortened


class BlockGuards:
    """The conditions that a short capture has relied on (``guards``), for all blocks of the model."""

    def __init__(self, guards: Guards, model: nn.Module, stacks: Sequence[Stack]) -> None:
        self.guards = guards.for_all_numbers()
        self._model = model
        self._stacks = tuple(stacks)

    def broken(self) -> tuple[str, str] | None:
        """The first condition that no longer holds, and the line that relies on it; None if all hold."""
        for stack in self._stacks:
            names = list(stack.container._modules)
            if len(names) != stack.count:
                return f"len({_path(stack)}) == {stack.count}", ""
            if names != [str(k) for k in range(stack.count)]:
                return f"the submodules of {_path(stack)} were in the order of their numbers", ""
        for number in range(max(stack.windows for stack in self._stacks)):
            with shortened(self._stacks, number):
                broken = self.guards.broken()
            if broken is not None:
                return self._named(broken[0], number), broken[1]
        return None

    def without(self, names: Collection[str]) -> BlockGuards:
        """The same conditions, but for those on parameters and buffers of these FQNs; a block has what the others have
        that are like it.
        """
        return BlockGuards(self.guards.without(names), self._model, self._stacks)

    def _named(self, condition: str, number: int) -> str:
        """A condition with the numbers that the blocks have in the model."""
        for stack in self._stacks:
            start, *rest = re.split(rf"({re.escape(_path(stack))}\.)(\d+)\b", condition)
            found = zip(rest[::3], rest[1::3], rest[2::3])
            window = stack.window(number)
            condition = start + "".join(f"{path}{window[int(block)]}{behind}" for path, block, behind in found)
        return condition

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockGuards:
        model = deepcopy(self._model, memo)
        stacks = [replace(stack, container=model.get_submodule(stack.path)) for stack in self._stacks]
        return BlockGuards(self.guards.on(model), model, stacks)


def _path(stack: Stack) -> str:
    return f"model.{stack.path}".removesuffix(".")
