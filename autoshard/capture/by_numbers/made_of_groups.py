"""What tensors of whole numbers are that a model makes of the groups of its rows alone, found by numbers.

How rows are counted, ordered and put back is written in many ways: ``histc`` and sums of comparisons; ``argsort`` of an
order, and numbers written where it says. What each of these is for random groups tells what it is: for even ones, and
for such as a limit on the rows of a group, or one that has none, would show.

Shapes: S rows, G groups.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node as FxNode
from torch.fx import map_arg

_DRAWS = 5
_LARGEST = 1 << 24
"""Tensors of more numbers are not computed."""


class MadeOfGroups:
    """The tensors of a graph that depend on nothing but the groups of its rows.

    Args:
        group: the groups (S), integers.
        order: the rows in the order of their groups (S), the second result of ``sort``.
    """

    def __init__(self, group: FxNode, order: FxNode) -> None:
        self._group, self._order = group, order
        self._rows: int = group.meta["val"].shape[0]
        self._chosen = group  # that of which all are made: the experts of each token, of which the groups are a view
        while (given := _made_of_one(self._chosen)) is not None:
            self._chosen = given
        self._alone = {self._chosen}
        for node in group.graph.nodes:
            if node.op == "call_function" and self._alone.issuperset(node.all_input_nodes) and _is_computed(node):
                self._alone.add(node)
        self._found: dict[tuple[int, int], dict[FxNode, Any]] = {}
        self._ends: dict[tuple[int, int], Tensor] = {}

    def each(self, node: FxNode) -> int | None:
        """The ``each`` for which a tensor (S) is the sorted order divided by it, which reads every row so many times;
        None where it is anything else.
        """
        counts = set()
        for draw in range(_DRAWS):
            order, found = self._numbers(self._order, self._rows, draw), self._numbers(node, self._rows, draw)
            if found is None or order is None or found.shape != order.shape or found.is_floating_point():
                return None
            count = int(found.max()) + 1
            each = self._rows // count if count > 0 else 0
            if each * count != self._rows or not torch.equal(found, order // each):
                return None
            counts.add(each)
        return counts.pop() if len(counts) == 1 else None

    def is_back(self, node: FxNode) -> bool:
        """Whether a tensor (S) says where each row has gone: indexed by it, what is sorted is as it was."""
        for draw in range(_DRAWS):
            order, found = self._numbers(self._order, self._rows, draw), self._numbers(node, self._rows, draw)
            if found is None or order is None or found.shape != order.shape or found.is_floating_point():
                return False
            is_within = int(found.min()) >= 0 and int(found.max()) < self._rows
            if not is_within or not torch.equal(order[found], torch.arange(self._rows, device="cpu")):
                return False
        return True

    def is_ends(self, node: FxNode, groups: int) -> bool:
        """Whether a tensor (G) says where the rows of each group end once they are sorted."""
        for draw in range(_DRAWS):
            found = self._numbers(node, groups, draw)
            if found is None or groups < 1:
                return False
            if (groups, draw) not in self._ends:
                in_groups = self._numbers(self._group, groups, draw).clamp(0, groups - 1)
                self._ends[groups, draw] = torch.bincount(in_groups, minlength=groups).cumsum(0)
            ends = self._ends[groups, draw]
            if found.shape != ends.shape or not torch.equal(found.to(ends.dtype), ends):
                return False
        return True

    def _numbers(self, node: FxNode, groups: int, draw: int) -> Any:
        """A tensor where each row is of one of so many groups, as drawn; None where it depends on more."""
        if node not in self._alone:
            return None
        if (groups, draw) not in self._found:
            value = self._chosen.meta["val"]
            self._found[groups, draw] = {self._chosen: _drawn(groups, draw, value.shape).to(value.dtype)}
        found = self._found[groups, draw]
        if node not in found:
            args, kwargs = map_arg((node.args, node.kwargs), lambda given: self._numbers(given, groups, draw))
            try:
                found[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            except Exception:  # torch operators raise anything, as where there are fewer groups than were drawn
                found[node] = None
        return found[node]


def _drawn(groups: int, draw: int, shape: torch.Size) -> Tensor:
    """A group for each row: of all groups as many or most of the first ones, all of one, or none of some."""
    shares = torch.rand(shape, generator=torch.Generator().manual_seed(draw), device="cpu")
    shares = (shares, shares**4, shares * 0, shares * 0 + 1, shares / 2)[draw]
    return (shares * groups).long().clamp(0, groups - 1)


def _made_of_one(node: FxNode) -> FxNode | None:
    """The one tensor of as many integers that a node is made of, as a view or a cast is."""
    value, given = node.meta["val"], node.all_input_nodes
    if node.op != "call_function" or node.target is operator.getitem or len(given) != 1:
        return None
    before = given[0].meta.get("val")
    is_alike = isinstance(before, Tensor) and before.numel() == value.numel() and not before.is_floating_point()
    return given[0] if is_alike else None


def _is_computed(node: FxNode) -> bool:
    """Whether a node computes tensors that are not too large, the same every time."""
    value, op = node.meta.get("val"), node.target
    if op is not operator.getitem and torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
        return False
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(each, Tensor) and each.numel() <= _LARGEST for each in values)
