"""What a forward reads in turn: items and attributes, of which a deep model may read others than a short one.

The guards of a short capture know what its few blocks have read, or missed. What the other blocks read is under other
keys, which no code names: under numbers, or what is made of them (``rates[f"layer{k}.rate"]``). What was asked so may
hold it, and counts as a whole.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._dynamo.source import ConstDictKeySource, GlobalSource, TypeDictSource, TypeMROSource, TypeSource
from torch._guards import Guard, Source
from torch.nn.utils.parametrize import ParametrizationList

from ..lines import is_of_library

CONSTANTS = ("CONSTANT_MATCH", "EQUALS_MATCH")
"""Conditions on all that there is of a value."""
_TABLES = frozenset(nn.Module().__dict__)
# What Python and torch themselves ask for, by names and numbers that stand in no code.
_ATTRIBUTES = frozenset({*_TABLES, "forward", "cell_contents", "fget", "func", "args", "keywords"})
_CONTAINERS = re.compile(
    r"__builtins_dict__\w*'\]$|\.__(closure|defaults|kwdefaults|mro)__$|\._\w*hooks\w*$|_modules('\])?$"
)


def asked_in_turn(
    kept: Sequence[Guard], scope: dict[str, Any], codes: Iterable[CodeType]
) -> tuple[list[Source], list[Source]]:
    """The containers of constants that were asked by number or by a key that no code names; and what else was asked so,
    or for attributes of such names. Lists that hold modules are among the latter, however they were asked.

    Args:
        codes: all code that was traced.
    """
    words = frozenset(word for code in codes for word in _words(code))
    keyed = {guard.originating_source for guard in kept if guard.create_fn_name() == "DICT_KEYS_MATCH"}
    whole = {guard.originating_source for guard in kept if guard.create_fn_name() in CONSTANTS}
    items: dict[Source, set[Any]] = {}
    attributes: dict[Source, set[Any]] = {}
    for guard in kept:
        for where, key, is_item in _asked(guard):
            is_usual = isinstance(key, str) and (key.startswith("__") or (not is_item and key in _ATTRIBUTES))
            if not (is_usual or key in words or where in whole or _is_of_library(where)):
                (items if is_item else attributes).setdefault(where, set()).add(key)
    constants, others = [], []
    for where, keys in items.items():
        value = where.get_value(scope, {}, {})
        if isinstance(value, (list, tuple, dict)) and _is_constant(value):
            constants.append(where)
        elif not (isinstance(value, range) or _is_all_asked(value, keys, where in keyed) or _are_tensors(value, keys)):
            others.append(where)
    others += [where for where, names in attributes.items() if _are_in_turn(names) and not _has_no_others(where, scope)]
    return constants, others


def has_one_owner(where: Any, scope: dict[str, Any], model: nn.Module) -> bool:
    """Whether what a name leads to, by way of a module, is that module's alone: no class's, and in no other module."""
    chain = [where]
    while getattr(chain[-1], "base", None) is not None:
        chain.append(chain[-1].base)
    if any(isinstance(each, TypeSource) for each in chain):
        return False
    objects = [each for each in chain if getattr(each, "member", None) not in _TABLES]
    held = {id(value) for each in objects if not isinstance(value := each.get_value(scope, {}, {}), nn.Module)}
    return sum(id(value) in held for module in model.modules() for value in vars(module).values()) <= 1


def _asked(guard: Guard) -> Iterator[tuple[Source, Any, bool]]:
    """What a guard has to do with: an owner, a key or the name of an attribute, and whether it is a key."""
    where: Any = guard.originating_source
    given = getattr(guard.create_fn, "keywords", {})
    if "key" in given:
        yield where, given["key"], True
    elif isinstance(given.get("attr"), str):
        yield where, given["attr"], False
    while where is not None:
        if hasattr(where, "member"):
            yield where.base, where.member, False
        elif hasattr(where, "index") and _is_a_container(where.base) and not isinstance(where, ConstDictKeySource):
            yield where.base, where.index, True
        where = getattr(where, "base", None)


def _is_a_container(where: Source) -> bool:
    is_of_class = isinstance(where, TypeMROSource | TypeDictSource)
    return not is_of_class and _CONTAINERS.search(where.name) is None


def _words(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield from (word for word in _leaves(code.co_consts) if isinstance(word, str))


def _leaves(value: Any) -> Iterator[Any]:
    """The constants in a constant, ``for name in ("a", "b")`` has a tuple of them."""
    if isinstance(value, tuple | frozenset):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _are_in_turn(names: Set[str]) -> bool:
    """Whether names that no code has may be those of blocks: numbered ones, or more than two. One or two are made of
    something else (``config.output_router_logits``, of what a model can give).
    """
    return len(names) > 2 or any(map(str.isdigit, "".join(names)))


def _is_of_library(where: Any) -> bool:
    """Whether something is a global variable of a library's, which keeps what it found there."""
    while getattr(where, "base", None) is not None:
        where = where.base
    name = where.global_name if isinstance(where, GlobalSource) else ""
    module = name.removeprefix("__import_").replace("_dot_", ".")
    return is_of_library(str(getattr(sys.modules.get(module), "__file__", None)))


def _is_constant(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_constant, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple)):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype))


def _is_all_asked(value: Any, keys: Set[Any], has_these_alone: bool) -> bool:
    """Whether each item was, of other things than modules, and no more of them can come."""
    if isinstance(value, dict):
        return has_these_alone and value.keys() <= keys and not _has_modules(value.values())
    return isinstance(value, (list, tuple)) and {*range(len(value))} <= keys and not _has_modules(value)


def _are_tensors(value: Any, keys: Set[Any]) -> bool:
    """Whether items are a module's own tensors, which whoever runs the graph looks at."""
    return isinstance(value, dict) and all(isinstance(value.get(key), torch.Tensor) for key in keys)


def _has_no_others(where: Source, scope: dict[str, Any]) -> bool:
    """Whether something has no attributes but those that were asked for: a range; and torch's own list of what makes a
    parameter, which it asks how many there are.
    """
    return isinstance(where.get_value(scope, {}, {}), range | ParametrizationList)


def _has_modules(values: Iterable[Any]) -> bool:
    return any(isinstance(each, nn.Module) for each in values)
