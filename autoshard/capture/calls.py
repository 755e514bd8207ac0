"""How a model is called, as text: the nesting of its arguments, the names of its tensors, and its Python constants.

A plan carries it, so that a job can capture the model again from the plan alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from ..errors import InputError, PlanFileError
from .arguments import input_names

_SCALARS = (bool, int, float, str, type(None))


def check_is_module(model: object) -> None:
    """Checks that a model is one.

    Raises:
        InputError: it is a class of models, or no model at all.
    """
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InputError(f"the model is the class {model.__name__}; give an object of it, {model.__name__}(...)")
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is a {type(model).__name__}, and no nn.Module; give the model first")


def check_keywords(kwargs: object) -> None:
    """Checks that keyword arguments are some, and no second input beside a first that stands alone.

    Raises:
        InputError: they are no mapping.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(
            f"the keyword arguments are a {type(kwargs).__name__}, and no mapping from names to values; give the "
            "inputs as a tuple: (x, t)"
        )


def as_arguments(value: Any) -> tuple[Any, ...]:
    """Positional arguments as a tuple; a list becomes one, and anything else is the one argument."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def describe_call(args: tuple[Any, ...], kwargs: dict[str, Any], name_of: Callable[[Any], str | None]) -> str:
    """Writes arguments as JSON: ``{"tensor": name}`` for a tensor, ``{"tuple": [...]}``, ``{"dict": {...}}``, lists and
    scalars as they are. An empty text if the arguments hold anything else; they must then be given again.

    Args:
        name_of: the name of a tensor, None for any other value. Called in argument order.
    """

    def encode(value: Any) -> Any:
        name = name_of(value)
        if name is not None:
            return {"tensor": name}
        if type(value) is tuple:
            return {"tuple": [encode(item) for item in value]}
        if type(value) is list:
            return [encode(item) for item in value]
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return {"dict": {key: encode(item) for key, item in value.items()}}
        if type(value) in _SCALARS:
            return value
        raise TypeError(type(value).__name__)

    try:
        return json.dumps([encode(args), encode(kwargs)])
    except TypeError:
        return ""


def rebuild_call(text: str, tensor: Callable[[str], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that :func:`describe_call` wrote, with ``tensor(name)`` in place of each tensor.

    Raises:
        PlanFileError: the text is not such a description.
    """

    def decode(value: Any) -> Any:
        if isinstance(value, list):
            return [decode(item) for item in value]
        if isinstance(value, dict):
            ((kind, inner),) = value.items()
            if kind == "tensor":
                return tensor(inner)
            if kind == "tuple":
                return tuple(decode(item) for item in inner)
            if kind == "dict":
                return {key: decode(item) for key, item in inner.items()}
            raise ValueError(kind)
        return value

    try:
        args, kwargs = (decode(part) for part in json.loads(text))
        if isinstance(args, tuple) and isinstance(kwargs, dict):
            return args, kwargs
    except (ValueError, TypeError, AttributeError, RecursionError, KeyError):
        pass
    raise PlanFileError(f"the plan's call {text[:80]!r} is not a description of arguments; make the plan again")


def call_text(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """How a model is called, as :func:`describe_call` writes it, its tensors by the names of the graph's inputs."""
    leaves, _ = tree_flatten((args, kwargs))
    named = zip(input_names(model, args, kwargs), leaves)
    supply = iter([name for name, leaf in named if isinstance(leaf, torch.Tensor)])
    return describe_call(args, kwargs, lambda value: next(supply) if isinstance(value, torch.Tensor) else None)
