"""Dynamo's names of values, and what is to hold of these, as data: kept with a graph, and read in another process."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from torch._dynamo import source
from torch._dynamo.guards import GuardBuilder
from torch._guards import Source

# How dynamo finds a value: those of its sources that are names and constants, which any process can follow.
_SOURCES = frozenset(
    {
        "AttrSource",
        "CellContentsSource",
        "ClosureSource",
        "CodeSource",
        "ConstDictKeySource",
        "DefaultsSource",
        "DictGetItemSource",
        "DictSubclassGetItemSource",
        "GenericAttrSource",
        "GetItemSource",
        "GlobalSource",
        "ImportSource",
        "ListGetItemSource",
        "LocalSource",
        "ParamBufferSource",
        "TypeDictSource",
        "TypeMROSource",
        "TypeSource",
        "UnspecializedBuiltinNNModuleSource",
        "UnspecializedNNModuleSource",
        "UnspecializedParamBufferSource",
    }
)
_NAMES = frozenset({"freevar_name", "global_name", "idx_key", "local_name", "member"})


class NotDataError(Exception):
    """A guard has something to do with an object that only this process has."""


class Written:
    """Sources as data, each of them once: its class, and its fields; that of another source is the number of that."""

    def __init__(self) -> None:
        self.sources: list[tuple[str, dict[str, Any]]] = []
        self.globals: set[str] = set()
        self._numbers: dict[Source, int] = {}

    def source(self, where: Source) -> int:
        """The number of a source."""
        if where not in self._numbers:
            kind = type(where).__name__
            if kind not in _SOURCES:
                raise NotDataError
            held = {field.name: getattr(where, field.name) for field in fields(where) if field.init}
            written = (kind, {name: self._value(value) for name, value in held.items()})
            if isinstance(where, source.GlobalSource):
                self.globals.add(where.global_name)
            self._numbers[where] = len(self.sources)
            self.sources.append(written)
        return self._numbers[where]

    def condition(self, create: Any) -> tuple[str, dict[str, Any]]:
        """What is to hold of a value: how dynamo calls it, and with what."""
        made = create if isinstance(create, partial) else partial(create)
        name = str(getattr(made.func, "__name__", ""))
        if getattr(GuardBuilder, name, None) is not made.func or made.args:
            raise NotDataError
        return name, {key: self._value(value) for key, value in made.keywords.items()}

    def _value(self, value: Any) -> Any:
        if isinstance(value, Source):
            return {"source": self.source(value)}
        if value is None or type(value) in (bool, int, str):
            return value
        raise NotDataError


class Read:
    """Sources and conditions of what :class:`Written` wrote.

    Torch evaluates the name of a source as Python: what is no constant in it is an identifier here, or refused.
    """

    def __init__(self, written: Iterable[tuple[str, dict[str, Any]]]) -> None:
        self._found: list[Source] = []
        for kind, held in written:
            names = [held[name] for name in _NAMES & held.keys() if isinstance(held[name], str)]
            if kind not in _SOURCES or not all(name.isidentifier() for name in names if name):
                raise ValueError(kind)
            if held.get("module_name", "torch") not in sys.modules:
                raise ValueError(kind)
            self._found.append(getattr(source, kind)(**{name: self._value(value) for name, value in held.items()}))

    def source(self, number: int) -> Source:
        """The source with a number."""
        return self._found[number]

    def condition(self, name: str, given: Mapping[str, Any]) -> Any:
        """What :meth:`Written.condition` was given."""
        create = getattr(GuardBuilder, name)
        if not name.isupper():
            raise ValueError(name)
        return partial(create, **{key: self._value(value) for key, value in given.items()}) if given else create

    def _value(self, value: Any) -> Any:
        return self._found[value["source"]] if isinstance(value, dict) else value
