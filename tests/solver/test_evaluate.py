"""The judge, against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from solver import INFEASIBLE, Edge, Group, Node, Problem, ProblemError, evaluate
from solver.evaluate import usage_timeline


def example() -> Problem:
    """A tensor with two consumers of one group, a plain edge between the consumers, and 30 bytes of memory."""
    rows, cols = np.array([0, 1]), np.array([0, 1, 1])
    costs = np.array([[0, 5], [7, INFEASIBLE]])
    nodes = (
        Node("t", np.array([1, 2]), np.array([10, 20]), (0, 10)),
        Node("p", np.array([3, 4, 5]), np.array([10, 10, 15]), (2, 6)),
        Node("q", np.array([6, 7, 8]), np.array([9, 5, 15]), (6, 8)),
    )
    plain = Edge.dense(1, 2, np.arange(9).reshape(3, 3))
    return Problem(
        nodes, (Edge(0, 1, rows, cols, costs), Edge(0, 2, rows, cols, costs), plain), (Group((0, 1)),), usage_limit=30
    )


def test_a_column_chosen_twice_is_paid_once() -> None:
    # nodes 1 + 4 + 8, group 5 once, plain edge (1, 2) = 5
    assert evaluate(example(), (0, 1, 2)).cost == 23


def test_different_columns_are_both_paid() -> None:
    # nodes 1 + 3 + 7, group 0 + 5, plain edge (0, 1) = 1
    assert evaluate(example(), (0, 0, 1)).cost == 17


def test_an_absent_pair_is_named_and_priced_at_infeasible() -> None:
    judged = evaluate(example(), (1, 1, 0))
    assert not judged.feasible
    assert judged.violations == ("edge 0 (0, 1) has no pair (1, 1)",)
    assert judged.cost == 2 + 4 + 6 + (INFEASIBLE + 7) + 3


def test_usage_counts_half_open_intervals() -> None:
    # t holds 20 over [0, 10), p 15 over [2, 6), q 15 over [6, 8): 35 from step 2, never 50.
    assert usage_timeline(example(), (1, 2, 2)) == [(0, 20), (2, 35), (6, 35), (8, 20), (10, 0)]
    judged = evaluate(example(), (1, 2, 2))
    assert (judged.peak_usage, judged.peak_step) == (35, 2)
    assert "usage is 35 at step 2, over the limit 30" in judged.violations


def test_ties_and_fixed_choices_are_judged() -> None:
    nodes = tuple(Node(name, np.array([0, 0])) for name in "ab")
    judged = evaluate(Problem(nodes, (), ties=((0, 1),), fixed={0: 1}), (0, 1))
    assert len(judged.violations) == 2


def test_totals_pass_int64_exactly() -> None:
    nodes = tuple(Node(f"n{k}", np.array([INFEASIBLE - 1])) for k in range(20))
    assert evaluate(Problem(nodes, ()), (0,) * 20).cost == 20 * (10**18 - 1) > 2**63


@pytest.mark.parametrize("choices", [(0, 0), (0, 0, 3), (0, -1, 0)])
def test_choices_must_fit(choices: tuple[int, ...]) -> None:
    with pytest.raises(ProblemError):
        evaluate(example(), choices)
