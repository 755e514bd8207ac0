"""Stacks of a model: submodules in a row (``layers.0``, ``layers.1``, ...), most of which come again and again.

What comes again is a block: one submodule that is built as the others are or, where kinds of them take turns (five
layers that attend to a window, and one that attends to all), one of each turn. Others may stand before the first block
(dense layers before those that route) and behind the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..arguments import same_constant
from ..contained import told

FEWEST = 8
"""Submodules from which on a short capture, and the two runs that check it, take less time than a whole one."""

SHORT = 5
"""The blocks of a short model: a first one, two in the middle, and two last ones."""

MIDDLE = 1, 2
"""Those in the middle of a short model."""

LONGEST = 8
"""The most submodules that a block has, and the most kinds of them."""

_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


class Turns(NamedTuple):
    """Where things in a row come again: ``size`` blocks of ``each``, the first of them at ``first``."""

    first: int
    each: int
    size: int

    @property
    def spared(self) -> int:
        """How many things a short row does without."""
        return (self.size - SHORT) * self.each


@dataclass(frozen=True, eq=False)
class Stack:
    """``size`` blocks of ``each`` submodules of ``container``, whose FQN is ``path``; the first block begins with
    submodule ``first``, and there are ``count`` submodules in all. ``differing`` are the names of attributes that are
    not the same in all blocks, such as the index of a layer.
    """

    path: str
    container: nn.Module
    first: int
    each: int
    size: int
    count: int
    differing: frozenset[str]

    @property
    def windows(self) -> int:
        """How many windows it takes to see every block."""
        return (self.size - SHORT + len(MIDDLE) + 1) // len(MIDDLE)

    def window(self, number: int) -> tuple[int, ...]:
        """The submodules of a short model: those that belong to no block, and the first block, two in the middle, and
        the last two. The windows have all blocks in turn.
        """
        middle = min(1 + len(MIDDLE) * number, self.size - 4)
        end = self.first + self.size * self.each
        blocks = (0, middle, middle + 1, self.size - 2, self.size - 1)
        starts = (self.first + block * self.each for block in blocks)
        inside = (start + k for start in starts for k in range(self.each))
        return (*range(self.first), *inside, *range(end, self.count))


def stacks_of(model: nn.Module, fewest: int) -> Iterator[Stack]:
    """The outermost stacks of at least so many submodules, whose blocks' tensors nobody else has."""
    holders = _holders(model)
    inside: str | None = None
    for path, module in model.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        if len(module._modules) < fewest:
            continue
        if list(module._modules) != [str(k) for k in range(len(module._modules))]:
            continue
        built = [None if each is None else _built(each, holders) for each in module._modules.values()]
        alike = _alike(built)
        turns = _turns(_kinds(built, alike)) or _turns(alike)
        if turns is not None:
            inside = f"{path}." if path else ""
            yield Stack(path, module, *turns, len(built), _differing(built, turns))


@contextmanager
def shortened(stacks: Sequence[Stack], number: int = 0) -> Iterator[None]:
    """Leaves ``SHORT`` blocks of each stack, its :meth:`~Stack.window` of that number, and puts the others back."""
    tables = [stack.container._modules for stack in stacks]
    kept = [dict(table) for table in tables]
    try:
        for stack, table, modules in zip(stacks, tables, kept):
            table.clear()
            table.update({str(k): modules[str(index)] for k, index in enumerate(stack.window(number))})
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


class _Built(NamedTuple):
    """How a submodule is built: its modules, tensors and hooks; and the other attributes of each module."""

    parts: list[Any]
    attributes: list[dict[str, Any]]


def _alike(built: Sequence[_Built | None]) -> list[int]:
    """For each submodule the first one that is built as it is."""
    leaders: list[int] = []
    found = []
    for k, each in enumerate(built):
        leader = next((i for i in leaders if (there := built[i]) and each and there.parts == each.parts), k)
        if leader == k:
            leaders.append(k)
        found.append(leader)
    return found


def _kinds(built: Sequence[_Built | None], alike: Sequence[int]) -> list[int]:
    """A number for each submodule that those have in common that are built alike, and whose attributes are the same as
    far as these tell a few kinds apart.
    """
    marks = [[leader] for leader in alike]
    for leader, count in Counter(alike).items():
        if count == 1:
            continue
        members = [k for k, other in enumerate(alike) if other == leader]
        for values in _values([built[k] for k in members]):
            classes = _classes(values)
            if 2 * len(set(classes)) <= count and len(set(classes)) <= LONGEST:
                for k, which in zip(members, classes):
                    marks[k].append(which)
    number: dict[tuple[int, ...], int] = {}
    return [number.setdefault(tuple(mark), len(number)) for mark in marks]


def _values(alike: Sequence[_Built | None]) -> Iterator[list[Any]]:
    """What each attribute is in submodules that are built alike."""
    for tables in zip(*(each.attributes for each in alike if each is not None)):
        for key in sorted(set().union(*tables)):
            yield [table.get(key, _ABSENT) for table in tables]


_ABSENT = object()


def _classes(values: Sequence[Any]) -> list[int]:
    """For each value the number of those that it is the same as; where there are more than LONGEST, it goes no further
    into which.
    """
    leaders: list[Any] = []
    found = []
    for value in values:
        which = next((k for k, leader in enumerate(leaders) if _same(leader, value)), len(leaders))
        if which == len(leaders):
            leaders.append(value)
        if len(leaders) > LONGEST:
            return list(range(len(values)))
        found.append(which)
    return found


def _turns(kinds: Sequence[int]) -> Turns | None:
    """Where kinds in a row come again and again, so that the most are spared; None where that is too few."""
    best: Turns | None = None
    for each in range(1, LONGEST + 1):
        place = 0
        for again, run in groupby(a == b for a, b in zip(kinds, kinds[each:])):
            length = len(list(run))
            found = Turns(place, each, (length + each) // each)
            if again and found.size > SHORT and (best is None or found.spared > best.spared):
                best = found
            place += length
    # as many as of the fewest alike ones
    return best if best is not None and best.spared * FEWEST >= (FEWEST - SHORT) * len(kinds) else None


def _differing(built: Sequence[_Built | None], turns: Turns) -> frozenset[str]:
    """The attributes in which blocks differ."""
    differing: set[str] = set()
    for k in range(turns.each):
        first, *others = built[turns.first + k : turns.first + turns.each * turns.size : turns.each]
        for other in others:
            assert first is not None and other is not None
            for mine, its in zip(first.attributes, other.attributes, strict=True):
                differing |= {
                    key for key in mine.keys() | its.keys() if not _same(mine.get(key, its), its.get(key, mine))
                }
    return frozenset(differing)


def _built(block: nn.Module, holders: Counter[int]) -> _Built | None:
    """How a submodule is built; None where it shares something."""
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
        names = {id(tensor): name for name, tensor in module._buffers.items()}
        own = {key: value for key, value in module.__dict__.items() if key not in _OF_EVERY_MODULE}
        attributes.append({key: told(_unbound(value, module), partial(_named, names)) for key, value in own.items()})
    return _Built(parts, attributes)


def _unbound(value: Any, module: nn.Module) -> Any:
    """A method of a module itself as the function that it is, which is that of others, too."""
    is_own = isinstance(value, MethodType) and value.__self__ is module
    return ("its own", value.__func__) if is_own else value


def _named(names: Mapping[int, str], tensor: torch.Tensor) -> Any:
    """A tensor in a container as the name that its module has for it, if there is one."""
    return names.get(id(tensor), tensor)


def _hook_tables(module: nn.Module) -> Iterable[Any]:
    return (value for key, value in module.__dict__.items() if key in _OF_EVERY_MODULE and key.endswith("_hooks"))


def _hooks(table: Any) -> Any:
    return [_function(hook) for hook in table.values()] if isinstance(table, dict) else id(table)


def _function(value: Any) -> Any:
    """What tells a function from others: its code, and what it encloses; of other objects which one it is."""
    if type(value) in (bool, int, float, str, bytes, type(None)):
        return type(value), value
    if type(value) is not FunctionType:
        return id(value)
    try:
        enclosed = [_function(cell.cell_contents) for cell in value.__closure__ or ()]
    except (ValueError, RecursionError):  # a cell that is empty still, or functions that enclose themselves
        return id(value)
    return id(value.__code__), id(value.__defaults__), id(value.__kwdefaults__), enclosed


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
    if type(a) is type(b) is partial:
        return _same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    return same_constant(a, b)
