"""Numbers that Python draws and dynamo need not, as nothing depends on what they are."""

from __future__ import annotations

import dis
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from torch._dynamo.source import RandomValueSource
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstantVariable, SkipFunctionVariable, user_defined
from torch._dynamo.variables.lazy import LazyCache, LazyVariableTracker

from .python_draws import compared, is_from_zero_to_one
from .variables import constant_of, dispatch_tables, stack_here


class _ToDraw(LazyCache):
    """A number from zero to one that is not drawn as long as nobody but a comparison asks for it."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__(object(), RandomValueSource(0))
        self._draw = draw
        self._drawn_at = stack_here()

    def realize(self) -> None:
        """Has dynamo draw it, which it refuses in a graph that stands for every call."""
        try:
            self.vt = self._draw()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._drawn_at}") from None


@contextmanager
def draws_left_out() -> Iterator[None]:
    """Has Python draw nothing where it draws a number from zero to one and only compares it with what decides the
    comparison, whatever is drawn: the drop of a layer with a probability of nothing.
    """
    draw: Any = getattr(user_defined, "call_random_fn", None)
    call_skipped = SkipFunctionVariable.call_function

    def if_asked_for(tx: Any, fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if kwargs or not is_from_zero_to_one(fn, tuple(map(constant_of, args))):
            return draw(tx, fn, args, kwargs)
        return LazyVariableTracker(_ToDraw(partial(draw, tx, fn, args, kwargs)))

    def skipped(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Torch 2.13 skips ``random.random``, as what is not written in Python."""
        if self.value == random.random and not args:
            return if_asked_for(tx, random.random, args, kwargs)
        return call_skipped(self, tx, list(args), kwargs)

    if draw is None:
        yield
        return
    kept = [(table, list(table)) for table in dispatch_tables(InstructionTranslatorBase)]
    code = dis.opmap["COMPARE_OP"]
    try:
        for table, before in kept:
            table[code] = partial(_compare_if_known, before[code])
        with (
            patch.object(user_defined, "call_random_fn", if_asked_for),
            patch.object(SkipFunctionVariable, "call_function", skipped),
        ):
            yield
    finally:
        for table, before in kept:
            table[code] = before[code]


def _compare_if_known(compare: Any, translator: Any, instruction: Any) -> None:
    left, right = translator.stack[-2:]
    known = None
    if _is_to_draw(left) or _is_to_draw(right):
        other = left if _is_to_draw(right) else right
        number = None if _is_to_draw(other) else constant_of(other)
        known = compared(instruction.argval, number, is_turned=other is left)
    if known is None:
        compare(translator, instruction)
    else:
        translator.popn(2)
        translator.push(ConstantVariable.create(known))


def _is_to_draw(variable: Any) -> bool:
    return type(variable) is LazyVariableTracker and isinstance(variable._cache, _ToDraw)
