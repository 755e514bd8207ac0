"""Partition specs: a layout as PyTorch/XLA's ``mark_sharding`` writes it, one entry per dim of the tensor.

``(dp, None)``
    dim 0 is cut over ``dp``, dim 1 is whole;
``(("dp", "tp"), None)``
    dim 0 is cut over ``dp``, and each block again over ``tp``;
``(0, None)``
    axes may be given by their number in the mesh.

Names may stand with quotes or without, so that ``f"tokens={('dp', None)}"`` is a pin. Source of the notation:
torch_xla.distributed.spmd.mark_sharding, "a tuple of device_mesh dimension index or None".
"""

from __future__ import annotations

import re

from ..errors import LayoutError
from ..layout import Layout, R, S
from ..mesh import Mesh

_TOKEN = re.compile(r"\s*(?:(?P<mark>[(),\[\]])|(?P<quote>['\"]?)(?P<word>[A-Za-z_]\w*|\d{1,3})(?P=quote))")
_CLOSING = {"(": ")", "[": "]"}

Entry = str | tuple[str, ...] | None
Spec = tuple[Entry, ...]
"""The axes of every dim, as they were written."""


def is_partition_spec(text: str) -> bool:
    """Whether a text is meant as a partition spec: it begins with a bracket."""
    return text.lstrip()[:1] in ("(", "[")


def parse_partition_spec(text: str, mesh: Mesh) -> tuple[Layout, int]:
    """The layout of a partition spec, and the number of dims that it has entries for.

    Raises:
        LayoutError: it cannot be read, names an axis that the mesh does not have or one twice, or cuts one dim over
            axes in another order than the mesh's.
    """
    entries = _Reader(text).spec()
    placements = [R] * mesh.ndim
    used: set[int] = set()
    for dim, entry in enumerate(entries):
        axes = [_axis(name, text, mesh) for name in _names(entry)]
        if axes != sorted(axes):
            raise LayoutError(
                f"the partition spec {text.strip()!r} cuts dim {dim} over {mesh.axes[axes[0]]} first; only the order "
                f"of the mesh ({mesh}) is supported"
            )
        for axis in axes:
            if axis in used:
                raise LayoutError(f"the partition spec {text.strip()!r} names axis {mesh.axes[axis]!r} twice")
            used.add(axis)
            placements[axis] = S(dim)
    return Layout(tuple(placements)), len(entries)


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _axis(name: str, text: str, mesh: Mesh) -> int:
    if name.isdecimal() and int(name) < mesh.ndim:
        return int(name)
    if name not in mesh.axes:
        raise LayoutError(f"the partition spec {text.strip()!r} names axis {name!r}; the mesh {mesh} has no such axis")
    return mesh.index(name)


class _Reader:
    """Reads a tuple or list of words, None and tuples of words."""

    def __init__(self, text: str) -> None:
        self._text = text.strip()
        self._tokens = self._split()

    def spec(self) -> Spec:
        entries = self._entries(self._opening(), nested=True)
        if self._tokens:
            raise self._unreadable()
        return tuple(entries)

    def _split(self) -> list[str]:
        tokens, position = [], 0
        while position < len(self._text):
            match = _TOKEN.match(self._text, position)
            if match is None:
                raise self._unreadable()
            tokens.append(match["mark"] or match["word"])
            position = match.end()
        return tokens

    def _opening(self) -> str:
        if not self._tokens or self._tokens[0] not in _CLOSING:
            raise self._unreadable()
        return _CLOSING[self._tokens.pop(0)]

    def _entries(self, closing: str, nested: bool) -> list[str | tuple[str, ...] | None]:
        entries: list[str | tuple[str, ...] | None] = []
        while self._tokens and self._tokens[0] != closing:
            if self._tokens[0] in _CLOSING and nested:
                inner = self._entries(self._opening(), nested=False)
                entries.append(tuple(str(name) for name in inner if name is not None))
            elif self._tokens[0] in "()[],":
                raise self._unreadable()
            else:
                word = self._tokens.pop(0)
                entries.append(None if word in ("None", "null") else word)
            if self._tokens and self._tokens[0] == ",":
                self._tokens.pop(0)
            elif not self._tokens or self._tokens[0] != closing:
                raise self._unreadable()
        if not self._tokens:
            raise self._unreadable()
        self._tokens.pop(0)
        return entries

    def _unreadable(self) -> LayoutError:
        return LayoutError(
            f"cannot read the partition spec {self._text!r}; write for every dim an axis, None or several axes in "
            "parentheses, for example (dp, None)"
        )
