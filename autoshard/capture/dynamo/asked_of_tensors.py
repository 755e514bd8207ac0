"""What a forward asks of tensors beside their numbers, shapes and dtypes: which object one is, how it lies in memory.

Torch's own code asks so, too, to be quick; only what a model asks by itself is looked at here.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._dynamo.symbolic_convert import compare_op_handlers
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TensorVariable, builtin
from torch._guards import Guard

from ...errors import CaptureError
from ..lines import at, is_models_file, lines_in
from .seen import attribute_asked
from .variables import constant_of, stack_here

STRIDES = "Tensor.stride"
"""Stands among the names that a model's code uses where it asks how a tensor lies in memory."""
CLASS = "Tensor.__class__"
"""Stands there where it asks of which class an argument is, as far as that tells plain tensors, parameters and buffers
apart.
"""
ATTRIBUTE = "Tensor.hasattr "
"""Begins such a name for each attribute that an argument had not when the forward asked for it."""
_OF_STRIDES = {"stride", "is_contiguous", "storage_offset", "data_ptr", "untyped_storage", "storage"}
_OF_ONE_CALL = {"grad", "_base"}
_ARGUMENT = "L['flat_args']"
_KINDS = (torch.empty(0), nn.Parameter(torch.empty(0)), nn.Buffer(torch.empty(0)))


@contextmanager
def real_objects(numbers: Mapping[int, int]) -> Iterator[None]:
    """Has ``id`` of a parameter or buffer be that of the model's own, and refuses to tell arguments apart, which are
    other objects in every call.

    Args:
        numbers: what ``id`` gives for the model's own tensor, by what it gives for the one that is traced in its place.
    """
    call = builtin.BuiltinVariable.call_function  # dynamo keeps for ever what it found of any other method

    def of_function(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self.fn is not id or len(args) != 1:
            return call(self, tx, args, kwargs)
        if _is_argument(args[0].realize()) and _is_models_own(tx):
            raise _which("takes the id of an argument")
        found = call(self, tx, args, kwargs)
        number = constant_of(found)
        return ConstantVariable.create(numbers[number]) if number in numbers else found

    def told_apart(compare: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        left, right = both = [each.realize() for each in args]
        are_tensors = all(isinstance(each, TensorVariable) and each.source is not None for each in both)
        if are_tensors and left is not right and any(map(_is_argument, both)) and _is_models_own(tx):
            raise _which("asks whether an argument is the same object as another tensor")
        return compare(tx, args, kwargs)

    comparisons = {sign: partial(told_apart, compare_op_handlers[sign]) for sign in ("is", "is not")}
    with (
        patch.object(builtin.BuiltinVariable, "call_function", of_function),
        patch.dict(compare_op_handlers, comparisons),
    ):
        yield


@contextmanager
def asked_into(names: set[str]) -> Iterator[None]:
    """Adds :data:`STRIDES` to the names where the forward asks how a tensor lies in memory, :data:`CLASS` where it asks
    of which class an argument is; and refuses to say what gradient an argument has, or what it is a view of, which no
    shard of it knows.
    """
    call_method, attribute = TensorVariable.call_method, TensorVariable.var_getattr
    call = builtin.BuiltinVariable.call_function

    def of_method(self: Any, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name in _OF_STRIDES and _is_models_own(tx):
            names.add(STRIDES)
        return call_method(self, tx, name, args, kwargs)

    def of_attribute(self: Any, tx: Any, name: str) -> Any:
        if (name == "__class__" or name in _OF_ONE_CALL) and _is_argument(self) and _is_models_own(tx):
            if name in _OF_ONE_CALL:
                raise _which(f"asks for {name} of an argument")
            names.add(CLASS)
        return attribute(self, tx, name)

    def of_function(self: Any, tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self.fn in (type, isinstance) and args and _is_argument(_if_tensor(args[0])) and _is_models_own(tx):
            if len(args) == 1 or _tells_apart(constant_of(args[1])):
                names.add(CLASS)
        return call(self, tx, args, kwargs)

    with (
        patch.object(TensorVariable, "call_method", of_method),
        patch.object(TensorVariable, "var_getattr", of_attribute),
        patch.object(builtin.BuiltinVariable, "call_function", of_function),
    ):
        yield


def _if_tensor(variable: Any) -> Any:
    """A variable of dynamo's, looked at if it stands for a tensor: dynamo guards on what is looked at."""
    is_lazy = isinstance(variable, LazyVariableTracker) and not variable.is_realized()
    return variable.realize() if not is_lazy or issubclass(variable.peek_type(), torch.Tensor) else variable


def _tells_apart(classes: Any) -> bool:
    """Whether some of plain tensors, parameters and buffers are of these classes and others are not; classes that
    nobody knows do.
    """
    return classes is None or len({isinstance(kind, classes) for kind in _KINDS}) > 1


def attributes_asked(guards: Iterable[Guard], arguments: Iterable[Any]) -> frozenset[str]:
    """Which attributes the forward asks arguments for that Python has put on tensors, and that none of them has.

    Raises:
        CaptureError: one has it: in another call it may have another value.
    """
    given = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    found = set()
    for guard in guards:
        name = attribute_asked(guard) if guard.create_fn_name() == "HASATTR" and _ARGUMENT in guard.name else ""
        if name and not hasattr(torch.Tensor, name):  # which all have
            if any(name in vars(argument) for argument in given):
                line = at(lines_in("".join(traceback.format_list(guard.user_stack or []))))
                raise CaptureError(
                    f"the forward asks an argument for its attribute {name!r}{line}, which no plan can go by: in every "
                    "call it may be another. Give it as an argument of its own instead"
                )
            found.add(name)
    return frozenset(found)


def _is_argument(variable: Any) -> bool:
    return isinstance(variable, TensorVariable) and variable.source is not None and _ARGUMENT in variable.source.name


def _is_models_own(translator: Any) -> bool:
    """Whether the code that dynamo is in is the model's."""
    return is_models_file(translator.f_code.co_filename)


def _which(asks: str) -> CaptureError:
    return CaptureError(
        f"the forward {asks}{at(lines_in(stack_here()))}, which no plan can go by: in every call it is another object. "
        "Give a flag as an argument instead"
    )
