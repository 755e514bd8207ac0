"""Every invariant of a problem is checked once, with an error that says where and what."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from solver import INFEASIBLE, Edge, Group, Node, Problem, ProblemError

TWO = np.array([0, 1])
NODES = (Node("a", TWO), Node("b", TWO), Node("c", np.array([0, 1, 2])))
EDGE = Edge.dense(0, 1, np.array([[0, 1], [1, 0]]))

BROKEN: dict[str, tuple[Callable[[], object], str]] = {
    "no strategy": (lambda: Node("a", np.array([], np.int64)), "'a' has no strategy"),
    "float costs": (lambda: Node("a", np.array([0.5])), "must be integers"),
    "too large a cost": (lambda: Node("a", np.array([INFEASIBLE + 1])), "10\\^18"),
    "lengths of usages": (lambda: Node("a", TWO, np.array([1]), (0, 1)), "2 costs and 1 usages"),
    "negative usage": (lambda: Node("a", TWO, np.array([1, -1]), (0, 1)), "negative usage -1"),
    "negative interval": (lambda: Node("a", TWO, TWO, (-1, 1)), "interval"),
    "backward interval": (lambda: Node("a", TWO, TWO, (3, 1)), "interval"),
    "self edge": (lambda: Edge.dense(1, 1, np.zeros((2, 2), np.int64)), "joins a node to itself"),
    "flat matrix": (lambda: Edge(0, 1, TWO, TWO, np.zeros(4, np.int64)), "2 dimension"),
    "row out of range": (lambda: Edge(0, 1, TWO, TWO, np.zeros((1, 2), np.int64)), "rows of edge"),
    "unknown node": (lambda: Problem(NODES[:1], (EDGE,)), "edge 0 names node 1"),
    "shape of an edge": (lambda: Problem(NODES, (Edge.dense(0, 2, EDGE.costs),)), "2 and 2 strategies"),
    "group of nothing": (lambda: Problem(NODES, (EDGE,), (Group(()),)), "has no edge"),
    "group of unknown edge": (lambda: Problem(NODES, (EDGE,), (Group((1,)),)), "names edge 1"),
    "edge in two groups": (lambda: Problem(NODES, (EDGE,), (Group((0,)), Group((0,)))), "is in group 0"),
    "group of two producers": (
        lambda: Problem(NODES, (EDGE, Edge.dense(1, 0, EDGE.costs)), (Group((0, 1)),)),
        "producers 0 and 1",
    ),
    "group of different costs": (
        lambda: Problem(NODES, (EDGE, Edge.dense(0, 1, EDGE.costs + 1)), (Group((0, 1)),)),
        "different rows or costs",
    ),
    "negative group": (lambda: Problem(NODES, (Edge.dense(0, 1, -EDGE.costs),), (Group((0,)),)), "negative cost -1"),
    "tie of unequal counts": (lambda: Problem(NODES, (), ties=((0, 2),)), "expected equal counts"),
    "tied twice": (lambda: Problem(NODES, (), ties=((0, 1), (1,))), "tied already"),
    "fixed out of range": (lambda: Problem(NODES, (), fixed={0: 2}), "2 is not one of them"),
    "negative limit": (lambda: Problem(NODES, (), usage_limit=-1), "usage_limit is -1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_invariant_is_named(name: str) -> None:
    build, text = BROKEN[name]
    with pytest.raises(ProblemError, match=text):
        build()
