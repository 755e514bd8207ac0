"""What every reduction is: an exact rewrite of a problem into a smaller one, with its way back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..problem import IntArray, Problem

Choices = tuple[int, ...]


class WayBack(Protocol):
    """Translates assignments between the problem before a reduction and the one after it."""

    def lift(self, choices: Choices) -> Choices:
        """The assignment of the problem before, at the same cost, from a feasible one of the problem after."""
        ...

    def lower(self, choices: Choices) -> Choices:
        """An assignment of the problem after, near the one of the problem before. It need not be feasible."""
        ...


@dataclass(frozen=True)
class Reduced:
    """The smaller problem and the way back."""

    problem: Problem
    way_back: WayBack


@dataclass(frozen=True)
class Contradiction:
    """The reduction proved that no assignment is feasible; `reason` says why."""

    reason: str


Outcome = Reduced | Contradiction | None
"""None: the reduction found nothing to do."""

Reduction = Callable[[Problem], Outcome]


@dataclass(frozen=True, eq=False)
class Substitution:
    """Every node before is a function of one node after.

    Node i before chooses tables[i][choice of node owners[i]]; with owners[i] = -1 it chooses tables[i][0], a constant.
    """

    owners: Sequence[int]
    tables: Sequence[IntArray]
    nodes_after: int

    def lift(self, choices: Choices) -> Choices:
        """The choices before the rewrite that those after it stand for."""
        return tuple(
            int(table[choices[owner] if owner >= 0 else 0])
            for owner, table in zip(self.owners, self.tables, strict=True)
        )

    def lower(self, choices: Choices) -> Choices:
        """Per node after, the choice that gives the most nodes before what they had."""
        votes: list[IntArray | None] = [None] * self.nodes_after
        for owner, table, choice in zip(self.owners, self.tables, choices, strict=True):
            if owner >= 0:
                agrees = (table == choice).astype(np.int64)
                before = votes[owner]
                votes[owner] = agrees if before is None else before + agrees
        return tuple(0 if vote is None else int(np.argmax(vote)) for vote in votes)


class Pool:
    """One array object per content, so that equal maps and matrices are recognised by identity."""

    def __init__(self) -> None:
        # Given arrays are kept beside their representatives, so that no id is reused while the pool lives.
        self._by_id: dict[int, tuple[IntArray, IntArray]] = {}
        self._by_content: dict[tuple[tuple[int, ...], bytes], IntArray] = {}
        self._transposed: dict[int, IntArray] = {}

    def __call__(self, array: IntArray) -> IntArray:
        """The first array given that has the content of this one."""
        known = self._by_id.get(id(array))
        if known is None:
            one = self._by_content.setdefault((array.shape, array.tobytes()), array)
            self._by_id[id(array)] = known = (array, one)
            self._by_id[id(one)] = (one, one)
        return known[1]

    def array(self, identity: int) -> IntArray:
        """The array that has this id."""
        return self._by_id[identity][1]

    def transposed(self, array: IntArray) -> IntArray:
        """The transpose, as one array object per content."""
        one = self(array)
        if id(one) not in self._transposed:
            self._transposed[id(one)] = self(np.ascontiguousarray(one.T))
        return self._transposed[id(one)]
