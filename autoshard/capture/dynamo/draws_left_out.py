"""Numbers that Python or numpy draws and dynamo need not, as nothing depends on what they are."""

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
from torch._dynamo.variables import ConstantVariable, NumpyVariable, SkipFunctionVariable, user_defined
from torch._dynamo.variables.lazy import LazyCache, LazyVariableTracker
from torch._dynamo.variables.misc import get_np_to_tnp_map

from .python_draws import compared, is_from_zero_to_one, numpy_draws_from_zero_to_one, numpy_draws_one
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
    comparison, whatever is drawn: the drop of a layer with a probability of nothing. One number of numpy's is
    taken for one of Python's: dynamo would have torch draw it, and take it out of a tensor.
    """
    draw: Any = getattr(user_defined, "call_random_fn", None)
    call_skipped, call_numpy = SkipFunctionVariable.call_function, NumpyVariable.call_function

    def if_asked_for(tx: Any, fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if kwargs or not is_from_zero_to_one(fn, tuple(map(constant_of, args))):
            return draw(tx, fn, args, kwargs)
        return LazyVariableTracker(_ToDraw(partial(draw, tx, fn, args, kwargs)))

    def skipped(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Torch 2.13 skips ``random.random``, as what is not written in Python."""
        if self.value == random.random and not args:
            return if_asked_for(tx, random.random, args, kwargs)
        return call_skipped(self, tx, list(args), kwargs)

    def of_numpy(self: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name, given = _name_in_numpy_random(self.value), tuple(map(constant_of, args))
        if not numpy_draws_one(name, given, kwargs):
            return call_numpy(self, tx, list(args), kwargs)
        if kwargs or not numpy_draws_from_zero_to_one(name, given):
            return draw(tx, _nothing_drawn, [], {})
        return LazyVariableTracker(_ToDraw(partial(draw, tx, _nothing_drawn, [], {})))

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
            patch.object(NumpyVariable, "call_function", of_numpy),
        ):
            yield
    finally:
        for table, before in kept:
            table[code] = before[code]


def _name_in_numpy_random(function: Any) -> str:
    """The name of a function of ``numpy.random`` that torch has, too; nothing for others."""
    ours = get_np_to_tnp_map().get(function)
    return ours.__name__ if ours is not None and ours.__module__ == "torch._numpy.random" else ""


def _nothing_drawn() -> float:
    """A number for dynamo, which is refused wherever it is asked for: numpy's state stays."""
    return 0.5


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
