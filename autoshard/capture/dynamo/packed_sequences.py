"""Packed sequences in a forward that dynamo follows: what :mod:`autoshard.capture.by_numbers.packed` has for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, cast
from unittest.mock import patch

from torch._dynamo.variables import SkipFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from ..by_numbers.packed import FUNCTIONS, RECURRENT, PackedSequence, run_recurrent


@contextmanager
def packed_sequences() -> Iterator[None]:
    """Has torch's functions make and take them, and recurrent modules run over them."""
    run = UnspecializedNNModuleVariable.call_function

    def of_module(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        given = args[0].realize() if args and type(self.value) in RECURRENT else None
        if isinstance(given, UserDefinedObjectVariable) and issubclass(given.value_type, PackedSequence):
            return UserFunctionVariable(cast(FunctionType, run_recurrent)).call_function(tx, [self, *args], kwargs)
        return run(self, tx, args, kwargs)

    with ExitStack() as stack:
        for kind in (SkipFunctionVariable, UserFunctionVariable):
            stack.enter_context(patch.object(kind, "call_function", _replacing(kind.call_function)))
        stack.enter_context(patch.object(UnspecializedNNModuleVariable, "call_function", of_module))
        yield


def _replacing(call: Any) -> Any:
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function = getattr(self, "value", None) or getattr(self, "fn", None)
        ours = FUNCTIONS.get(function) if callable(function) else None
        return (
            UserFunctionVariable(cast(FunctionType, ours)).call_function(tx, args, kwargs)
            if ours
            else call(self, tx, args, kwargs)
        )

    return call_function
