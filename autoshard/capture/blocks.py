"""Stacks of a model: submodules in a row (``layers.0``, ``layers.1``, ...) of which each is built as the others are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .arguments import same_constant

FEWEST = 8
"""Blocks from which on a short capture, and the two runs that check it, take less time than a whole one."""

SHORT = 5
"""The blocks of a short model: a first one, two in the middle, and two last ones."""

MIDDLE = 1, 2
"""Those in the middle of a short model."""

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


@dataclass(frozen=True, eq=False)
class Stack:
    """``size`` submodules of ``container``, whose FQN is ``path``. ``differing`` are the names of attributes that are
    not the same in all of them, such as the index of a layer.
    """

    path: str
    container: nn.Module
    size: int
    differing: frozenset[str]

    @property
    def windows(self) -> int:
        """How many windows it takes to see every block."""
        return (self.size - SHORT + len(MIDDLE) + 1) // len(MIDDLE)

    def window(self, number: int) -> tuple[int, ...]:
        """Blocks that stand where those of a short model do: the first one, two in the middle, and the last two. The
        windows have all blocks in turn.
        """
        middle = min(1 + len(MIDDLE) * number, self.size - 4)
        return 0, middle, middle + 1, self.size - 2, self.size - 1


def stacks_of(model: nn.Module, fewest: int) -> Iterator[Stack]:
    """The outermost stacks of at least so many blocks, whose tensors nobody else has."""
    holders = _holders(model)
    inside: str | None = None
    for path, module in model.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        if len(module._modules) < fewest:
            continue
        if list(module._modules) != [str(k) for k in range(len(module._modules))]:
            continue
        blocks = [block for block in module._modules.values() if block is not None]
        differing = _differing(blocks, holders) if len(blocks) == len(module._modules) else None
        if differing is not None:
            inside = f"{path}." if path else ""
            yield Stack(path, module, len(blocks), differing)


@contextmanager
def shortened(stacks: Sequence[Stack], number: int = 0) -> Iterator[None]:
    """Leaves ``SHORT`` blocks of each stack, its :meth:`~Stack.window` of that number, and puts the others back."""
    tables = [stack.container._modules for stack in stacks]
    kept = [dict(table) for table in tables]
    try:
        for stack, table, blocks in zip(stacks, tables, kept):
            table.clear()
            table.update({str(k): blocks[str(index)] for k, index in enumerate(stack.window(number))})
        yield
    finally:
        for table, modules in zip(tables, kept):
            table.clear()
            table.update(modules)


def _holders(model: nn.Module) -> Counter[int]:
    """How many places of a model hold each module, parameter and buffer, by identity."""
    held: Counter[int] = Counter()
    for module in model.modules():
        for table in (module._modules, module._parameters, module._buffers):
            held.update(id(value) for value in table.values() if value is not None)
    return held


def _differing(blocks: Sequence[nn.Module], holders: Counter[int]) -> frozenset[str] | None:
    """The attributes in which blocks differ; None where they are built differently, or share something."""
    first = _built(blocks[0], holders)
    differing: set[str] = set()
    for block in blocks:
        built = _built(block, holders)
        if built is None or first is None or built[0] != first[0]:
            return None
        for mine, its in zip(first[1], built[1], strict=True):
            differing |= {key for key in mine.keys() | its.keys() if not _same(mine.get(key, its), its.get(key, mine))}
    return frozenset(differing)


def _built(block: nn.Module, holders: Counter[int]) -> tuple[list[Any], list[dict[str, Any]]] | None:
    """The modules, tensors and hooks of a block, and the other attributes of each module; None for shared ones."""
    parts: list[Any] = []
    attributes = []
    for path, module in block.named_modules(remove_duplicate=False):
        parts.append((path, type(module), module.training, [_hooks(table) for table in _hook_tables(module)]))
        for table in (module._modules, module._parameters, module._buffers):
            if any(holders[id(value)] != 1 for value in table.values() if value is not None):
                return None
        for tensors in (module._parameters, module._buffers):
            parts.append([(name, _described(tensor)) for name, tensor in tensors.items()])
        parts.append(sorted(module._non_persistent_buffers_set))
        attributes.append({key: value for key, value in module.__dict__.items() if key not in _OF_EVERY_MODULE})
    return parts, attributes


def _hook_tables(module: nn.Module) -> Iterable[Any]:
    return (value for key, value in module.__dict__.items() if key in _OF_EVERY_MODULE and key.endswith("_hooks"))


def _hooks(table: Any) -> Any:
    return [id(hook) for hook in table.values()] if isinstance(table, dict) else id(table)


def _described(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _same(a: Any, b: Any) -> bool:
    """Whether two attributes are one value; objects are only what they are."""
    if type(a) is type(b) and isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if type(a) is type(b) and isinstance(a, dict):
        return list(a) == list(b) and all(_same(a[key], b[key]) for key in a)
    return same_constant(a, b)
