"""``x[k]`` and ``x[i, k] = y`` where a tensor holds the number ``k``, or Python has taken it out of one.

Torch has Python go by that number, and what it gives is a view. A step alone knows the number, so that what it picks is
looked up here, as ``x[[k]]`` is, and is a tensor of its own: :func:`picked` says so.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._dynamo.variables import (
    BuiltinVariable,
    ConstantVariable,
    SliceVariable,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
)
from torch._dynamo.variables.builder import wrap_fx_proxy

from ..examples import numbers_of_example, tensor_of
from .variables import constant_of

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)
"""Those of numbers: torch takes unsigned bytes for masks."""


def picked(rows: Tensor) -> Tensor:
    """Stands in a graph of dynamo's for a view: of the one row that was looked up, without its dim."""
    return rows.squeeze(0)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def in_tensor(number: int) -> Tensor:
    """Stands in a graph of dynamo's for the tensor that a number of Python's was taken out of."""
    return torch.scalar_tensor(number, dtype=torch.int64)


@dataclass(frozen=True)
class _Key:
    """An index with unknown numbers: it takes ``others``, and the numbers in ``dims`` of what these give."""

    others: tuple[Any, ...]
    dims: tuple[int, ...]
    numbers: tuple[Any, ...]


@contextmanager
def numbers_as_indices() -> Iterator[None]:
    """Has tensors be indexed by numbers that are unknown, once those that could be known are."""
    call, setitem = BuiltinVariable.call_function, TensorVariable.method___setitem__

    def getitem(x: Any, tx: Any, index: Any) -> Any:
        return call(BuiltinVariable(operator.getitem), tx, [x, index], {})

    def front(x: Any, tx: Any, key: _Key) -> Any:
        """What the other indices give, with the dims that have numbers in front."""
        if not all(map(_takes_all, key.others)):
            x = getitem(x, tx, TupleVariable(list(key.others)))
        places = tuple(range(len(key.dims)))
        if key.dims == places:
            return x
        return x.call_method(tx, "movedim", [_constant(key.dims), _constant(places)], {})

    def taken(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        x = args[0].realize() if self.fn is operator.getitem else None
        key = _key(x, tx, args[1]) if isinstance(x, TensorVariable) else None
        if key is None:
            return call(self, tx, args, kwargs)
        rows = getitem(front(x, tx, key), tx, _rows(tx, key))
        return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", picked, (rows.as_proxy(),), {}))

    def written(self: Any, tx: Any, index: Any, value: Any) -> Any:
        key = _key(self, tx, index)
        if key is None:
            return setitem(self, tx, index, value)
        return setitem(front(self, tx, key), tx, _rows(tx, key), value)

    with (
        patch.object(BuiltinVariable, "call_function", taken),
        patch.object(TensorVariable, "method___setitem__", written),
    ):
        yield


def _key(x: Any, tx: Any, index: Any) -> _Key | None:
    """An index with unknown numbers taken apart; None of any other, and of one with other tensors beside them."""
    index = index.realize()
    given = [each.realize() for each in index.items] if isinstance(index, TupleVariable) else [index]
    if not getattr(tx.fake_mode, "knows_numbers", False) or not any(map(_is_unknown, given)):
        return None
    named = sum(constant_of(each) is not Ellipsis and not _is_none(each) for each in given)
    others, dims, numbers, at = list[Any](), list[int](), list[Any](), 0
    for each in given:
        value = constant_of(each)
        if _is_unknown(each):
            others.append(SliceVariable([_constant(None)] * 3, tx))
            dims.append(at)
            numbers.append(each)
        elif value is Ellipsis or isinstance(each, SliceVariable) or type(value) is int or _is_none(each):
            others.append(each)
        else:
            return None
        if value is Ellipsis:
            at += x.ndim - named
        elif type(value) is not int:
            at += 1
    return _Key(tuple(others), tuple(dims), tuple(numbers))


def _rows(tx: Any, key: _Key) -> TupleVariable:
    """The numbers as indices of one row each."""
    return TupleVariable([_in_tensor(tx, each).call_method(tx, "reshape", [_constant(1)], {}) for each in key.numbers])


def _in_tensor(tx: Any, number: Any) -> Any:
    if isinstance(number, SymNodeVariable):
        return wrap_fx_proxy(tx, tx.output.create_proxy("call_function", in_tensor, (number.as_proxy(),), {}))
    return number.call_method(tx, "long", [], {})


def _is_unknown(variable: Any) -> bool:
    if isinstance(variable, SymNodeVariable):
        return isinstance(variable.sym_num, torch.SymInt)
    if not isinstance(variable, TensorVariable):
        return False
    node = variable.as_proxy().node
    value = tensor_of(node)
    is_number = value is not None and value.dim() == 0 and value.dtype in _INTEGERS
    return is_number and numbers_of_example(node) is None


def _takes_all(index: Any) -> bool:
    is_range = isinstance(index, SliceVariable)
    return constant_of(index) is Ellipsis or (is_range and all(map(_is_none, index.items)))


def _is_none(variable: Any) -> bool:
    return bool(variable.is_python_constant() and variable.as_python_constant() is None)


def _constant(value: Any) -> Any:
    return ConstantVariable.create(value)
