"""Layers left out of a step, as others are the same: which, and what those are called that stand for them.

0 1 2 3 4 5 ... 76 77 78 79     of which 1 to 78 are the same
0 1 2 3 | 76 77 78 79           what is left, where nothing reaches further than 2 layers
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

Where = tuple[int, str]


class Stack:
    """The layers of one list of modules: ``layers.3`` of ``layers``."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_odd = False  # whether a name begins like that of a layer and is none
        self._prefix = f"{path}." if path else ""
        self._known: dict[str, Where | None] = {}

    def where(self, name: str) -> Where | None:
        """The number of the layer that a name is of, and the rest of it; None for one of no layer."""
        if name not in self._known:
            self._known[name] = self._found(name)
        return self._known[name]

    def name(self, layer: int, rest: str) -> str:
        """The inverse of :meth:`where`."""
        return f"{self._prefix}{layer}{rest}"

    def _found(self, name: str) -> Where | None:
        if not name.startswith(self._prefix):
            return None
        behind = name[len(self._prefix) :]
        digits = len(behind) - len(behind.lstrip("0123456789"))
        is_layer = digits and behind[digits : digits + 1] in ("/", ".") and str(int(behind[:digits])) == behind[:digits]
        self.is_odd |= digits > 0 and not is_layer
        return (int(behind[:digits]), behind[digits:]) if is_layer else None


@dataclass(frozen=True)
class LeftOut:
    """The ``count`` layers of a stack from ``cut`` on, which are as the last ``period`` before these.

    What is left keeps its names. Layers are numbered on without a gap (:meth:`number`); what is the same for all of
    them holds from ``first`` to ``end``, in numbers of the whole step. None has to do with one more than ``reach``
    layers away.
    """

    stack: Stack
    first: int
    end: int
    cut: int
    count: int
    period: int
    reach: int

    @property
    def layers(self) -> range:
        """The layers left out."""
        return range(self.cut, self.cut + self.count)

    def number(self, layer: int) -> int | None:
        """The number of a layer in the shortened step; None for one that is left out, or not as the others."""
        return self.shifted(layer) if self.first <= layer < self.end and layer not in self.layers else None

    def layer(self, number: int) -> int:
        """The layer of a number."""
        return number if number < self.cut else number + self.count

    def like(self, layer: int) -> int:
        """The number of the layer that one left out is as."""
        return self.cut - self.period + (layer - self.cut) % self.period

    def shifted(self, layer: int) -> int:
        """The number of a layer that is left, whether it is as the others or not."""
        return layer if layer < self.cut else layer - self.count

    def times(self, name: str) -> int:
        """How many names something that is left stands for."""
        where = self.stack.where(name)
        return 1 if where is None else 1 + len(self.copies(where[0]))

    def beside(self, layer: int, reader: int) -> int:
        """The layer that is left and lies as far from that of a reader as another one does in the whole step."""
        if reader < self.cut:
            return layer if layer < self.cut else layer + self.count
        return layer if layer >= self.cut + self.count else layer - self.count

    def copies(self, number: int) -> range:
        """The layers left out that are as the layer of this number."""
        is_like_some = self.cut - self.period <= number < self.cut
        return range(number + self.period, self.cut + self.count, self.period) if is_like_some else range(0)

    def number_of(self, name: str) -> int | None:
        """The number of the layer of a name of what is left; None of no layer, or of one that is not as the others."""
        where = self.stack.where(name)
        return where and self.number(where[0])

    def renamed(self, name: str, number: int, layer: int) -> str:
        """The name for a layer of the whole step of what is called so in the layer of a number."""
        where, its = self.stack.where(name), self.number_of(name)
        return name if where is None or its is None else self.stack.name(layer + its - number, where[1])

    def names(self, name: str) -> Iterator[str]:
        """What is left by its name, and what it stands for."""
        yield name
        where = self.stack.where(name)
        if where is not None:
            yield from (self.stack.name(layer, where[1]) for layer in self.copies(where[0]))

    def like_name(self, name: str) -> str:
        """The name of what is left that something of the whole step is as."""
        where = self.stack.where(name)
        if where is None or where[0] not in self.layers:
            return name
        return self.stack.name(self.like(where[0]), where[1])
