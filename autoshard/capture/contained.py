"""Tensors in lists, tuples and dicts that modules have as attributes: tables by name, masks by layer.

A plan lays out what a model holds by name, so each that the forward reads becomes a buffer, too. The container stays
what it is, and has the very tensor that the buffer is.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_DICTS = (dict, OrderedDict, defaultdict)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_DEEPEST = 4


@dataclass(frozen=True, eq=False)
class Contained:
    """Where a module, whose FQN is ``path``, has a tensor: under ``keys``, one in the other, in ``attribute``."""

    path: str
    module: nn.Module
    attribute: str
    keys: tuple[Any, ...]

    def __str__(self) -> str:
        module = f"model.{self.path}".removesuffix(".")
        return f"{module}.{self.attribute}" + "".join(f"[{key!r}]" for key in self.keys)

    @property
    def name(self) -> str:
        """What the buffer is called, as no attribute that is written in Python can be: ``tables-a``."""
        return "-".join([self.attribute, *(str(key).replace(".", "_") for key in self.keys)])

    def now(self) -> Any:
        """What is there; None for nothing."""
        value: Any = vars(self.module).get(self.attribute)
        try:
            for key in self.keys:
                value = value[key]
        except (LookupError, TypeError):
            return None
        return value


def contained_in(model: nn.Module) -> Iterator[tuple[Contained, torch.Tensor]]:
    """The tensors in containers of a model, in order, each with its place."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _OF_EVERY_MODULE and not isinstance(value, torch.Tensor):
                for keys, tensor in _tensors_in(value, ()):
                    yield Contained(path, module, attribute, keys), tensor


def _tensors_in(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield keys, value
    elif len(keys) < _DEEPEST:
        for key, item in _items(value):
            yield from _tensors_in(item, (*keys, key))


def _items(value: Any) -> list[tuple[Any, Any]]:
    """What a container has under which key; nothing for any other object."""
    if type(value) in _DICTS:
        return [(key, item) for key, item in value.items() if type(key) in (str, int)]
    return list(enumerate(value)) if type(value) is list or _is_tuple(value) else []


def _is_tuple(value: Any) -> bool:
    """Whether a value is a tuple or a named one, of which others of its kind can be made."""
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_make"))


def exchange(model: nn.Module, pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Puts the second of each pair in the places where containers of a model have the first. Lists and dicts stay the
    same objects, and tuples with such a tensor are made again.

    Returns:
        The pairs with which another exchange makes the containers what they were.
    """
    others = {id(there): (there, other) for there, other in pairs}
    done: list[tuple[Any, Any]] = []
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if attribute not in _OF_EVERY_MODULE and not isinstance(value, torch.Tensor):
                _put(vars(module), attribute, _exchanged(value, others, done, 0))
    return done


def exchange_keys(model: nn.Module, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Puts the second of each pair in the place of the first where that is a key of a dict that a module has as an
    attribute, or in a container. The order of the keys stays.
    """
    others = {id(there): other for there, other in pairs}
    for module in model.modules():
        for attribute, value in vars(module).items():
            for found in _dicts_in(value, 0) if attribute not in _OF_EVERY_MODULE else ():
                if any(id(key) in others for key in found):
                    items = [(others.get(id(key), key), item) for key, item in found.items()]
                    found.clear()
                    found.update(items)


def _dicts_in(value: Any, depth: int) -> Iterator[dict[Any, Any]]:
    if type(value) in _DICTS:
        yield value
    if depth < _DEEPEST:
        for _, item in _items(value):
            yield from _dicts_in(item, depth + 1)


def _put(container: Any, key: Any, value: Any) -> None:
    if value is not container[key]:
        container[key] = value


def _exchanged(value: Any, others: Mapping[int, tuple[Any, Any]], done: list[tuple[Any, Any]], depth: int) -> Any:
    if id(value) in others:
        there, other = others[id(value)]
        done.append((other, there))
        # a tuple that is what it was may hold a list in which tensors were exchanged in their places
        return other if isinstance(other, torch.Tensor) else _exchanged(other, others, done, depth)
    if depth == _DEEPEST:
        return value
    if type(value) is frozenset and any(id(item) in others for item in value):
        of_others = frozenset(others[id(item)][1] if id(item) in others else item for item in value)
        done.append((of_others, value))
        return of_others
    items = [(key, item, _exchanged(item, others, done, depth + 1)) for key, item in _items(value)]
    if not isinstance(value, tuple):
        for key, _, item in items:
            _put(value, key, item)
        return value
    if all(item is before for _, before, item in items):
        return value
    made = (item for _, _, item in items)
    again = tuple(made) if type(value) is tuple else value._make(made)  # type: ignore[attr-defined]
    done.append((again, value))
    return again


def told(value: Any, tell: Callable[[torch.Tensor], Any], depth: int = 0) -> Any:
    """A container with what is told of its tensors in the place of each; any other value as it is."""
    if isinstance(value, torch.Tensor):
        return tell(value)
    if depth == _DEEPEST:
        return value
    if type(value) in _DICTS:
        return {key: told(item, tell, depth + 1) for key, item in value.items()}
    if type(value) is list or _is_tuple(value):
        made = [told(item, tell, depth + 1) for item in value]
        return made if type(value) is list else tuple(made)
    return value
