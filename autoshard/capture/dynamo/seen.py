"""What dynamo's own guards do not say enough of, and what is another object under a plan: looked at by ourselves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo import source
from torch._guards import Guard, Source

from .families import CONSTANTS
from .readable import readable

_MODULES = ("._modules", ".__dict__['_modules']")
KEYS, _HAS = "keys", "has "
# What a parallel module has among its attributes beside those of the user's model.
_OWN = ("_autoshard", "_compiled_call_impl")


@dataclass(frozen=True, eq=False)
class Seen:
    """How something looked: a tuple with lists in it, which dynamo compares with itself, a module in a plain list, a
    tensor; where there is an ``aspect``, that alone. Its name, where it is, and how it looked (:func:`_look`).

    ``code`` reads it in a hundredth of the time of ``source``, and every call of the module does that; None where the
    name is more than Python.
    """

    name: str
    source: Any
    code: CodeType | None
    look: str
    aspect: str = ""

    @property
    def condition(self) -> str:
        """That it looks so, as a reader writes it."""
        return f"{self.name} == {self.look}"

    def has_changed(self, scope: dict[str, Any]) -> bool:
        """Whether it looks otherwise now, or is gone."""
        try:
            value = self.source.get_value(scope, {}, {}) if self.code is None else FunctionType(self.code, scope)()
            return _look(value, scope, self.aspect) != self.look
        except (LookupError, AttributeError, TypeError):
            return True


def _look(value: Any, scope: dict[str, Any], aspect: str) -> str:
    """How a tensor looks, a DTensor as the tensor that it is a sharding of; which of the model's a module is; how any
    other value prints. Of a dict its keys in their order, or whether somebody has put an attribute on a tensor: that
    its class has one says nothing, as the class of a shard is another.
    """
    if aspect == KEYS:
        return repr([key if isinstance(key, str) else _look(key, scope, "") for key in value if key not in _OWN])
    if aspect:
        return str(aspect.removeprefix(_HAS) in vars(value))
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}".removeprefix("torch.")
    if isinstance(value, nn.Module):
        model = scope["L"]["self"]._modules["_export_root"].model
        return next((f"model.{path}" for path, module in model.named_modules() if module is value), "another module")
    return repr(value)


def seen(where: Source, scope: dict[str, Any], aspect: str = "") -> Seen:
    """How something looks."""
    value, name = where.get_value(scope, {}, {}), readable(where.name)
    if aspect:
        name = f"[*{name}]" if aspect == KEYS else f"hasattr({name}, {aspect.removeprefix(_HAS)!r})"
    return Seen(name, where, _code(where.name, scope, value), _look(value, scope, aspect), aspect)


def nested(guards: Iterable[Guard], scope: dict[str, Any]) -> Iterator[Seen]:
    """Containers that are constants to dynamo, and modules in lists and dicts that are no modules: which they are."""
    guards = list(guards)
    for where in (_source(guard) for guard in guards if guard.create_fn_name() in CONSTANTS):
        if isinstance(where.get_value(scope, {}, {}), (tuple, list, dict)):
            yield seen(where, scope)
    for where in dict.fromkeys(map(_source, guards)):
        item: Any = where.base if isinstance(where, source.NNModuleSource) else where
        if hasattr(item, "index") and not item.base.name.endswith(_MODULES):
            if isinstance(where.get_value(scope, {}, {}), nn.Module):
                yield seen(where, scope)


def is_on_dict_of_object(guard: Guard) -> bool:
    """Whether a guard is on which attributes an object has, one and all: a parallel module has one of autoshard's."""
    return guard.create_fn_name() in ("DICT_KEYS_MATCH", "SEQUENCE_LENGTH") and is_dict_of_object(_source(guard))


def is_dict_of_object(where: Source) -> bool:
    """Whether something is the dict of an object's attributes."""
    return getattr(where, "member", None) == "__dict__"


def _source(guard: Guard) -> Source:
    return guard.originating_source


def aspect_of(guard: Guard, scope: dict[str, Any]) -> str:
    """What of a value a guard is on that only we look at: which attributes an object has, whether a tensor has one, and
    the order of an ``OrderedDict``, of which dynamo sees the dict alone. Empty for any other.
    """
    if guard.create_fn_name() == "HASATTR":
        attribute = attribute_asked(guard)
        return attribute and f"{_HAS}{attribute}"
    if is_on_dict_of_object(guard):
        return KEYS
    is_ordered = guard.create_fn_name() == "DICT_KEYS_MATCH" and not guard.name.endswith("_hooks")
    return KEYS if is_ordered and isinstance(_source(guard).get_value(scope, {}, {}), OrderedDict) else ""


def attribute_asked(guard: Guard) -> str:
    """The attribute for which the forward asks something; empty before torch 2.12, which says it in another way."""
    attribute: str = getattr(guard.create_fn, "keywords", {}).get("attr", "")
    return attribute


def _code(name: str, scope: dict[str, Any], value: Any) -> CodeType | None:
    try:
        code = compile(name, "<guard>", "eval")
        return code if FunctionType(code, scope)() is value else None
    except Exception:  # dynamo has functions of its own in some names
        return None
