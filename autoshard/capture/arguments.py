"""The arguments of a call: a name for each leaf, and the call as ``forward`` receives it, defaults included.

``model(x, scale=2.0)`` and ``model(scale=2.0, x=x)`` are the same call to ``forward(self, x, scale, flip=False)``: its
leaves are named ``x``, ``scale`` and ``flip``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch import nn
from torch.utils._pytree import MappingKey, SequenceKey, TreeSpec, keystr, tree_flatten, tree_flatten_with_path

_PRINTED = (float, complex, slice, range)  # what they are can be read off how they print
_IMMUTABLE = (bool, int, str, bytes, torch.dtype, torch.device, torch.memory_format, torch.layout)
# Names that the graph gives to tensors of its own (``grad.0``, ``output.0``).
_RESERVED = frozenset({"grad", "output"})


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call as ``forward`` receives them: ``leaves`` in the order of its parameters, with defaults
    for those left out; ``names`` of the leaves; ``structure``, the containers they came in.
    """

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: TreeSpec

    def tensors(self) -> dict[str, torch.Tensor]:
        """The leaves that are tensors, by name."""
        return {name: leaf for name, leaf in zip(self.names, self.leaves) if isinstance(leaf, torch.Tensor)}


class CallSignature:
    """How a model's ``forward`` is called."""

    def __init__(self, model: nn.Module) -> None:
        self._received = inspect.signature(model.forward, follow_wrapped=False)
        # where a decorator receives *args, the parameters of what it decorates lend their names
        self._parameters = tuple(inspect.signature(model.forward).parameters.values())
        self._taken = model._parameters.keys() | model._buffers.keys() | model._modules.keys() | _RESERVED

    def names(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """A name for each leaf of ``(args, kwargs)``, in that order: that of its parameter, then keys into containers.

        Where the model has a parameter, buffer or submodule of that name, the name is put behind ``args.``.
        """
        leaves, _ = tree_flatten_with_path((args, kwargs))
        result = []
        for path, _ in leaves:
            top, *rest = path[1:]
            key = top.idx if isinstance(top, SequenceKey) else str(cast(MappingKey[str, Any], top).key)
            result.append(self._name(key, rest))
        return result

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call as ``forward`` receives it.

        Raises:
            TypeError: it takes other arguments; the message is Python's own.
        """
        bound = self._received.bind(*args, **kwargs)
        bound.apply_defaults()
        leaves, structure = tree_flatten(bound.arguments)
        paths = (path for path, _ in tree_flatten_with_path(bound.arguments)[0])
        return Call(tuple(self._bound_name(bound, path) for path in paths), tuple(leaves), structure)

    def _bound_name(self, bound: inspect.BoundArguments, path: Iterable[Any]) -> str:
        (parameter, *rest) = path
        kind = self._received.parameters[parameter.key].kind
        if kind is inspect.Parameter.VAR_POSITIONAL and rest:
            before = list(bound.arguments).index(parameter.key)
            return self._name(before + rest[0].idx, rest[1:])
        if kind is inspect.Parameter.VAR_KEYWORD and rest:
            return self._name(str(rest[0].key), rest[1:])
        return self._name(parameter.key, rest)

    def _name(self, key: int | str, rest: Iterable[Any]) -> str:
        """``key`` is a parameter's name, or the position of a positional argument."""
        first = self._positional(key) if isinstance(key, int) else key
        first = f"args.{first}" if first in self._taken else first
        return _leaf_name(first, rest)

    def _positional(self, position: int) -> str:
        """The name of a positional argument: that of the parameter that receives it, or ``rest.0`` for ``*rest``."""
        packed = f"args.{position}"
        for parameters in (self._received.parameters.values(), self._parameters):
            for index, parameter in enumerate(parameters):
                if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                    packed = f"{parameter.name}.{position - index}"
                    break
                if index == position:
                    return parameter.name
        return packed


def input_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """A name for each leaf of the arguments; see :meth:`CallSignature.names`."""
    return CallSignature(model).names(args, kwargs)


def keyword_names(arguments: Mapping[str, Any]) -> list[str]:
    """A name for each leaf of arguments by keyword, as :meth:`CallSignature.names` has it but for ``args.``."""
    leaves, _ = tree_flatten_with_path(dict(arguments))
    return [_leaf_name(str(cast(MappingKey[str, Any], path[0]).key), path[1:]) for path, _ in leaves]


def _leaf_name(first: str, rest: Iterable[Any]) -> str:
    """The name of a leaf of the argument of this name, behind these keys into containers."""
    return first + re.sub(r"[\[\]'\"]+", ".", keystr(tuple(rest))).rstrip(".")


def differences(planned: Call, call: Call) -> Iterator[str]:
    """What makes a call another one than it was when the model was captured, but for the values of its tensors."""
    if call.structure != planned.structure:
        yield _other_structure(planned, call)
        return
    for name, before, now in zip(planned.names, planned.leaves, call.leaves):
        if isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor):
            continue
        if not same_constant(before, now):
            yield f"{name} was {_shown(before)} when the model was captured and is {_shown(now)} now"


def same_constant(a: Any, b: Any) -> bool:
    """Whether two Python values are one to a program: of the same type and equal, NaN equal to itself, 0.0 not to -0.0.

    Objects that may change, and those whose ``==`` may say anything, are only equal to themselves.
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, _PRINTED):
        return repr(a) == repr(b)
    return type(a) in _IMMUTABLE and not isinstance(a, Enum) and bool(a == b)


def _other_structure(planned: Call, call: Call) -> str:
    missing = [name for name in planned.names if name not in call.names]
    extra = [name for name in call.names if name not in planned.names]
    captured_for = f"the model was captured for {', '.join(planned.names) or 'no arguments'}"
    if missing or extra:
        parts = [f"without {', '.join(missing)}"] * bool(missing) + [f"with {', '.join(extra)}"] * bool(extra)
        return f"{captured_for}; this call is {' and '.join(parts)}"
    if planned.names != call.names:
        return f"{captured_for} in this order; this call has another order"
    return "the arguments come in other containers (list, tuple, dict) than when the model was captured"


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
