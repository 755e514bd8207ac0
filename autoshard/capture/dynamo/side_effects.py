"""What a forward does to Python objects: dynamo knows it besides its graph."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch import nn
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstDictVariable, DeletedVariable, SetVariable
from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting
from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable

from ..arguments import same_constant
from ..lines import lines_in
from .readable import MODEL_SOURCE, readable

_BUFFERS = re.compile(re.escape(MODEL_SOURCE) + r"(?P<path>.*?)\.(_buffers|__dict__\['_buffers'\])")
_FIRST_CALL_MADE: ContextVar[bool] = ContextVar("whether the model is as its first call has left it", default=False)


@contextmanager
def first_call_made() -> Iterator[None]:
    """Inside, objects that are put in their own places count as changes: what the first call has put there was another
    before, which that call may have read.
    """
    token = _FIRST_CALL_MADE.set(True)
    try:
        yield
    finally:
        _FIRST_CALL_MADE.reset(token)


@dataclass(frozen=True)
class SideEffect:
    """A Python object that the forward changes: its name, and the line that changes it (empty where unknown).

    Where it is an attribute of a module that the forward sets, ``attribute`` is its path in the model, and
    ``is_constant`` says that it is no tensor and holds none.
    """

    name: str
    line: str
    attribute: str = ""
    is_constant: bool = False


@dataclass
class Changed:
    """What a forward changes: the FQNs of buffers that it replaces (``assigned``), and other objects."""

    assigned: list[str] = field(default_factory=list)
    side_effects: list[SideEffect] = field(default_factory=list)


@contextmanager
def side_effects_into(found: Changed) -> Iterator[None]:
    """Dynamo writes code that repeats side effects after the graph has run; just before, it has them all in a list."""
    write_code = SideEffects.codegen_update_mutated

    def and_record(self: SideEffects, *args: Any, **kwargs: Any) -> Any:
        found.assigned, found.side_effects = [], []  # code is written twice
        for variable in self._get_modified_vars():
            if isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting)):
                _record(self, variable, found)
        return write_code(self, *args, **kwargs)

    with patch.object(SideEffects, "codegen_update_mutated", and_record):
        yield


def _record(effects: SideEffects, variable: Any, found: Changed) -> None:
    if isinstance(variable, TorchFunctionModeStackVariable) and _leaves_modes(effects, variable):
        return
    source = variable.source.name if isinstance(variable.source.name, str) else variable.source.name()
    known: dict[Any, list[traceback.StackSummary]] = effects.mutation_user_stacks
    stacks = known.get(variable) or known.get(getattr(variable, "_base_vt", None))  # of an OrderedDict, its dict
    line = lines_in("".join(traceback.format_list(stacks[-1]))) if stacks else ""
    buffers = _BUFFERS.fullmatch(source)
    if buffers is not None and _keys(variable.items) == _keys(variable.original_items):
        path = readable("model" + buffers["path"]).removeprefix("model").removeprefix(".")
        found.assigned += [f"{path}.{key}".removeprefix(".") for key in _replaced(variable)]
    else:
        changed = _changed(effects, variable)
        found.side_effects += [_of_attribute(effects, variable, readable(source), name, line) for name in changed]


def _of_attribute(effects: SideEffects, variable: Any, owner: str, name: str, line: str) -> SideEffect:
    """The change of an object (where there is no name), or of its attribute of a name that begins with a dot."""
    path = f"{owner}{name}".removeprefix("model.")
    if not (name and isinstance(getattr(variable, "value", None), nn.Module) and re.fullmatch(r"[\w.]+", path)):
        return SideEffect(owner + name, line)
    value = effects.store_attr_mutations[variable][name[1:]]
    if isinstance(value, DeletedVariable):
        return SideEffect(owner + name, line)
    return SideEffect(owner + name, line, path, value.is_python_constant())


def _leaves_modes(effects: SideEffects, variable: Any) -> bool:
    """Whether a forward leaves as many modes of ``__torch_function__`` as there were: it enters some for a while."""
    output = effects.output_graph_weakref()
    return output is not None and len(variable.symbolic_stack) == len(output.torch_function_mode_stack)


def _keys(items: dict[Any, Any]) -> set[Any]:
    """Those that are constants, and what stands for the others."""
    return set(map(_constant, items))


def _constant(key: Any) -> Any:
    key = getattr(key, "vt", key)
    return key.as_python_constant() if key.is_python_constant() else key


def _replaced(variable: Any) -> list[str]:
    """The keys of a dict whose values are others than they were."""
    before: dict[Any, Any] = variable.original_items
    new = (key.vt for key, value in variable.items.items() if variable.is_new_item(before.get(key.vt), value))
    return [key.as_python_constant() for key in new]


def _is_as_it_was(variable: Any) -> bool:
    """Whether a set has what it had, or a dict the same values under the same keys in the same order."""
    before, after = variable.original_items, variable.items
    if isinstance(variable, SetVariable):
        return _keys(before) == _keys(after)
    if _FIRST_CALL_MADE.get() and after:
        return False
    is_so = map(_is_same, before.values(), after.values())
    return list(map(_constant, before)) == list(map(_constant, after)) and all(is_so)


def _is_same(was: Any, now: Any) -> bool:
    """Whether two of dynamo's variables stand for one object."""
    if was is now:
        return True
    was, now = was.realize(), now.realize()
    return was is now or (was.source is not None and was.source == now.source)


def _changed(effects: SideEffects, variable: Any) -> list[str]:
    """The attributes of an object that are not as they were, each behind a dot; one empty name for other objects, but
    for a set that has what it had, and a dict that has the same under the same keys: torch notes again that a buffer is
    not saved, where one takes the place of itself, peft empties a cache before every call, and ``functional_call`` puts
    parameters back.
    """
    attributes = effects.store_attr_mutations.get(variable)
    if not attributes:
        return [] if isinstance(variable, (ConstDictVariable, SetVariable)) and _is_as_it_was(variable) else [""]
    before = getattr(variable, "value", None)
    return [f".{name}" for name, value in attributes.items() if not _is_put_back(variable, name, before, value)]


def _is_put_back(variable: Any, name: str, before: Any, value: Any) -> bool:
    """Whether an attribute has the very object that it had, or the same constant."""
    is_same_object = value.source is not None and value.source == AttrSource(variable.source, name)
    return (is_same_object and not _FIRST_CALL_MADE.get()) or (
        value.is_python_constant()
        and hasattr(before, name)
        and same_constant(value.as_python_constant(), getattr(before, name))
    )
