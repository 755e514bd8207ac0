"""Integers from floating-point bounds: never above what the bound proves, and not below it by more than its error."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solver.backends.bounds import ERROR, RESOLUTION, integer_bound


@given(optimum=st.integers(-(10**12), 10**12), below=st.floats(0, 10), wrong=st.floats(-1, 1))
def test_a_bound_within_its_error_is_never_rounded_above_the_optimum(optimum: int, below: float, wrong: float) -> None:
    bound = optimum - below
    bound += wrong * max(1e-6, ERROR * abs(bound)) / 2
    assert integer_bound(bound, None) <= optimum


@given(optimum=st.integers(10**6, 10**9), missing=st.floats(0, 0.85))
def test_a_bound_less_than_one_below_an_integer_proves_it(optimum: int, missing: float) -> None:
    assert integer_bound(optimum - missing, None) == optimum


@given(cost=st.integers(1, 2**62), part=st.floats(0, 0.9))
def test_a_bound_that_agrees_with_the_cost_is_the_cost(cost: int, part: float) -> None:
    bound = float(cost - Fraction(part * RESOLUTION) * cost)
    if bound <= cost:
        assert integer_bound(bound, cost) == cost


@pytest.mark.parametrize(
    ("bound", "cost", "proven"), [(2.5, 4, 3), (2.0000001, None, 2), (-2.5, None, -2), (7.0, 9, 7)]
)
def test_bounds_far_from_the_cost_are_rounded_up(bound: float, cost: int | None, proven: int) -> None:
    assert integer_bound(bound, cost) == proven
