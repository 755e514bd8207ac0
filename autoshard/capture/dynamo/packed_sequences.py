"""Packed sequences in a forward that dynamo follows: what :mod:`autoshard.capture.by_numbers.packed` has for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, cast
from unittest.mock import patch

from torch._dynamo.variables import BuiltinVariable, ConstantVariable, SkipFunctionVariable, UserFunctionVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable
from torch.nn.utils import rnn

from ..by_numbers.packed import (
    FORWARDS,
    FUNCTIONS,
    PackedSequence,
    PackedSequenceSizes,
    packed_again,
    run_recurrent,
)


@contextmanager
def packed_sequences() -> Iterator[None]:
    """Has torch's functions and class make and take them, and recurrent modules run over them; ``isinstance`` says that
    they are of torch's class.
    """
    instance = BuiltinVariable.call_isinstance

    def call_isinstance(self: Any, tx: Any, given: Any, kinds: Any) -> Any:
        is_torchs = _is_a(PackedSequence, given) and issubclass(rnn.PackedSequence, kinds.as_python_constant())
        return ConstantVariable.create(True) if is_torchs else instance(self, tx, given, kinds)

    with ExitStack() as stack:
        for kind in (SkipFunctionVariable, UserFunctionVariable, UserDefinedClassVariable):
            stack.enter_context(patch.object(kind, "call_function", _replacing(kind.call_function)))
        stack.enter_context(patch.object(BuiltinVariable, "call_isinstance", call_isinstance))
        yield


def _replacing(call: Any) -> Any:
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function = getattr(self, "value", None) or getattr(self, "fn", None)
        given = [*self.self_args(), *args] if isinstance(self, UserFunctionVariable) else args  # of a method, too
        ours = _in_place_of(function, given, kwargs) if callable(function) else None
        return (
            UserFunctionVariable(cast(FunctionType, ours)).call_function(tx, given, kwargs)
            if ours
            else call(self, tx, args, kwargs)
        )

    return call_function


def _in_place_of(function: Any, args: Any, kwargs: Any) -> Any:
    """What stands for a function or class that is called; None where nothing does."""
    if function in FORWARDS and _is_a(PackedSequence, args[1] if len(args) > 1 else kwargs.get("input")):
        return run_recurrent
    if function is rnn.PackedSequence:
        given = args[1] if len(args) > 1 else kwargs.get("batch_sizes")
        return packed_again if _is_a(PackedSequenceSizes, given) else None
    return FUNCTIONS.get(function)


def _is_a(kind: type, given: Any) -> bool:
    given = None if given is None else given.unwrap()  # as it is: dynamo guards on what it looks into
    return isinstance(given, UserDefinedObjectVariable) and issubclass(given.value_type, kind)
