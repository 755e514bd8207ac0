"""Expressions with holes, and how holes are filled.

The first hole of a template names its operand: a letter for its kind, then how many dims it has at least (``{f2}``), or
exactly (``{f4x}``). Kinds: ``f`` floating, ``c`` complex, ``i`` whole numbers, ``b`` truth values, ``n`` numbers, ``t``
any. The same hole again stands for the same operand. The others depend on it: ``{same}`` a tensor of its shape,
``{wide}`` one that broadcasts with it, ``{mask}`` truth values that do, ``{dim}`` and ``{dims}`` of it, ``{size}`` the
length of some dim of it; and ``{k}`` 1 to 3, ``{z}`` -2 to 2, ``{num}`` a number, ``{bool}``, ``{len}`` a length.
"""

from __future__ import annotations

import re

import torch

from .writer import Unsuited, Writer

_HOLE = re.compile(r"\{(\w+)\}")
_OPERAND = re.compile(r"([fcibnt])(\d)?(x)?")
_KINDS = {
    "f": lambda t: t.is_floating_point(),
    "c": lambda t: t.is_complex(),
    "i": lambda t: not t.is_floating_point() and not t.is_complex() and t.dtype is not torch.bool,
    "b": lambda t: t.dtype is torch.bool,
    "n": lambda t: t.dtype is not torch.bool,
    "t": lambda t: True,
}


def fill(w: Writer, template: str) -> str:
    """A template as an expression.

    Raises:
        Unsuited: nothing fits a hole.
    """
    first = _HOLE.search(template)
    assert first, template
    operand = _operand(w, first[1])

    def hole(match: re.Match[str]) -> str:
        return operand if match[1] == first[1] else _dependent(w, match[1], operand)

    return _HOLE.sub(hole, template)


def _operand(w: Writer, hole: str) -> str:
    match = _OPERAND.fullmatch(hole)
    assert match, hole
    kind, low = _KINDS[match[1]], int(match[2] or 0)
    high = low if match[3] else 9
    return w.tensor(lambda t: kind(t) and low <= t.dim() <= high)


def _dependent(w: Writer, hole: str, operand: str) -> str:
    match hole:
        case "same":
            return w.like(operand)
        case "wide":
            return w.broadcastable(operand)
        case "mask":
            return mask(w, operand)
        case "dim":
            return str(w.dim(operand))
        case "dims":
            return str(w.dims(operand))
        case "size":
            return str(w.value(operand).shape[w.dim(operand)])
        case "k":
            return str(w.integer(1, 3))
        case "z":
            return str(w.pick((0, 1, -1, 2, -2)))
        case "num":
            return w.number()
        case "bool":
            return str(w.chance(50))
        case "len":
            return str(w.length())
    return _operand(w, hole)


def mask(w: Writer, operand: str) -> str:
    """Truth values that broadcast with a tensor: compared, given, held, or made from nothing."""
    value = w.value(operand)
    if not value.dim():
        raise Unsuited
    last = value.shape[-1]
    kinds = ["compared", "arange", "given", "there"] + ["triangle"] * 2 * (value.dim() > 1)
    match w.pick(kinds):
        case "compared" if not value.is_complex():
            return f"({operand} > {w.pick(('0.31', '-0.47'))})"
        case "triangle":
            which = w.pick(("tril", "triu"))
            of = f"torch.ones({value.shape[-2]}, {last}, dtype=torch.bool)"
            return f"{of}.{which}({w.integer(-3, 3)})" if w.chance(50) else f"torch.{which}({of}, {w.integer(-3, 3)})"
        case "given":
            return w.argument(tuple(value.shape[w.integer(0, value.dim()) :]), torch.bool)
        case "there":
            held = w.names(lambda t: t.dtype is torch.bool and 0 < t.dim() <= value.dim())
            return w.pick([name for name in held if value.shape[-w.value(name).dim() :] == w.value(name).shape])
    return f"(torch.arange({last}) {w.pick(('<', '>=', '=='))} {w.integer(0, max(last - 1, 0))})"
