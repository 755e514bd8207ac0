"""Values of a local graph without their numbers: shapes, strides, dtypes, and which of them share memory.

Torch says what an operator makes, by running it without values. It is asked once for each operator on arguments that
look the same: identical layers are most of a graph, and asking takes longer than all else in writing it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .adapter import FakeTensorMode, memory_of
from .sketch import NODES


@dataclass(frozen=True, eq=False, slots=True)
class Storage:
    """Memory that tensors share: equal to itself alone."""

    size_bytes: int


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """What a node of a graph makes: ``tensor`` is a tensor without values, a sequence of tensors, or something else.
    Equal values share it, so that only ``storages`` (one, or a sequence as long; None for what is no tensor) say which
    memory a value is in. Values of equal ``looks`` are the same to an operator.
    """

    tensor: Any
    storages: Any
    looks: Hashable

    def __getitem__(self, index: int) -> Value:
        return Value(self.tensor[index], self.storages[index], self.looks[index])  # type: ignore[index]

    @property
    def is_sequence(self) -> bool:
        """Whether an operator made several results."""
        return isinstance(self.tensor, (tuple, list))

    def parts(self) -> Iterator[tuple[Any, Storage | None]]:
        """The results, each with its memory."""
        return zip(self.tensor, self.storages) if self.is_sequence else iter([(self.tensor, self.storages)])

    def memory(self) -> list[Storage]:
        """The memory of each of the tensors of the value."""
        if type(self.storages) is Storage:  # nearly always
            return [self.storages]
        if not self.is_sequence:
            return []
        return [storage for storage in self.storages if storage is not None]

    def leaves(self) -> Iterator[tuple[torch.Tensor, Storage]]:
        """The tensors of the value, each with its memory."""
        return ((tensor, storage) for tensor, storage in self.parts() if storage is not None)


class _Place(NamedTuple):
    """Where a result of an operator lies: in the memory of the argument of this number, or in new memory of so many
    bytes, of which there may be several.
    """

    number: int
    size: int | None = None


def value_of(tensor: torch.Tensor, storage: Storage | None = None) -> Value:
    """The value that a tensor without values stands for, in memory of its own where none is given."""
    return Value(tensor, storage or Storage(tensor.untyped_storage().nbytes()), _looks(tensor))


class Results:
    """What operators make, as far as somebody asked: of one graph, or of several of one model.

    Args:
        most: how many are known at most before all are forgotten.
    """

    def __init__(self, most: int = 20_000) -> None:
        self.mode = FakeTensorMode()
        self._known: dict[Hashable, tuple[Any, Hashable, Any]] = {}
        self._most = most

    def of(self, op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Value:
        """The result of an operator, among whose arguments are nodes that have a value."""
        given: list[Value] = []
        positional = tuple([_key(arg, given) for arg in args])
        named = tuple([(name, _key(arg, given)) for name, arg in sorted(kwargs.items())]) if kwargs else ()
        key = op, positional, named
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self._most:
                self._known.clear()
            found = self._known[key] = self._asked(op, args, kwargs, given)
        tensor, looks, places = found
        memory = [storage for value in given for storage in value.memory()]
        if type(places) is _Place:  # nearly always
            return Value(tensor, Storage(places.size) if places.size is not None else memory[places.number], looks)
        if places is None:
            return Value(tensor, None, looks)
        new: dict[int, Storage] = {}

        def placed(place: _Place | None) -> Storage | None:
            if place is None:
                return None
            return memory[place.number] if place.size is None else new.setdefault(place.number, Storage(place.size))

        return Value(tensor, tuple(map(placed, places)), looks)

    def _asked(
        self, op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], given: Sequence[Value]
    ) -> tuple[Any, Hashable, Any]:
        """What torch makes, how it looks, and where it lies."""
        leaves = [leaf for value in given for leaf in value.leaves()]
        apart = _apart(leaves)
        of_argument = {memory_of(tensor): number for number, tensor in reversed(list(enumerate(apart)))}
        supply = iter(_like(given, apart))
        made = op(*_replaced(args, supply), **{name: _replaced(arg, supply) for name, arg in sorted(kwargs.items())})
        numbers: dict[int, int] = {}

        def place(tensor: Any) -> _Place | None:
            if not isinstance(tensor, torch.Tensor):
                return None
            if memory_of(tensor) in of_argument:
                return _Place(of_argument[memory_of(tensor)])
            number = numbers.setdefault(memory_of(tensor), len(numbers))
            return _Place(number, tensor.untyped_storage().nbytes())

        if isinstance(made, (tuple, list)):
            return made, tuple(map(_looks, made)), tuple(map(place, made))
        return made, _looks(made), place(made)


def _key(arg: Any, given: list[Value]) -> Hashable:
    """How an argument looks; values of nodes are noted in the order in which they come."""
    kind = type(arg)
    if kind in NODES:
        given.append(arg.meta["value"])
        return given[-1].looks
    if kind is not int and isinstance(arg, (tuple, list)):
        return tuple([_key(each, given) for each in arg])
    return kind, arg


def _replaced(arg: Any, supply: Iterator[Any]) -> Any:
    """An argument with the next of the supply for every node in it."""
    if isinstance(arg, NODES):
        return next(supply)
    if isinstance(arg, (tuple, list)):
        return type(arg)(_replaced(each, supply) for each in arg)
    return arg


def _apart(leaves: Sequence[tuple[torch.Tensor, Storage]]) -> list[torch.Tensor]:
    """Tensors that share memory only where the storages say so: equal values have one tensor between them."""
    owners: dict[int, Storage] = {}
    found = []
    for tensor, storage in leaves:
        if owners.setdefault(memory_of(tensor), storage) is not storage:
            tensor = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        found.append(tensor)
    return found


def _like(given: Sequence[Value], leaves: Sequence[torch.Tensor]) -> Iterator[Any]:
    """The arguments again, made of their tensors."""
    supply = iter(leaves)
    for value in given:
        made = [tensor if storage is None else next(supply) for tensor, storage in value.parts()]
        yield type(value.tensor)(made) if value.is_sequence else made[0]


def _looks(tensor: Any) -> Hashable:
    if not isinstance(tensor, torch.Tensor):
        return type(tensor), tensor
    bits = tensor.is_conj(), tensor.is_neg()
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, *bits
