"""Piecewise curves: continuous, zero at zero, never falling, and their pointwise maximum."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.curve import Curve

AMOUNTS = st.floats(0, 1e12)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    steps = st.floats(1e-3, 1e6)
    count = draw(st.integers(1, 6))
    xs = np.cumsum([draw(steps) for _ in range(count)])
    rises = [draw(st.one_of(st.just(0.0), steps)) for _ in range(count)]
    ys = np.cumsum([draw(steps), *rises[1:-1], *([draw(steps)] if count > 1 else [])])
    return Curve.through(zip(xs.tolist(), ys.tolist()))


def test_a_curve_by_hand() -> None:
    """Straight from the origin, through (10, 2) and (20, 2) and (30, 5), and on with the last slope of 0.3."""
    curve = Curve.through([(10, 2), (20, 2), (30, 5)])
    assert [curve(x) for x in (0, 5, 10, 15, 20, 25, 30, 40)] == pytest.approx([0, 1, 2, 2, 2, 3.5, 5, 8])


def test_an_efficiency_by_hand() -> None:
    """A quarter of the rate up to 10, half of it from 20 on: 10 takes 40 units, 20 take 40, 5 take 20, 40 take 80."""
    curve = Curve.of_efficiency([(10, 0.25), (20, 0.5)])
    assert [curve(x) for x in (0, 5, 10, 15, 20, 40)] == pytest.approx([0, 20, 40, 40, 40, 80])


@given(curves(), AMOUNTS, AMOUNTS)
def test_a_curve_starts_at_zero_and_never_falls(curve: Curve, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert curve(0) == 0
    assert curve(large) >= curve(small) * (1 - 1e-12)


@given(curves())
def test_there_is_no_jump_at_a_knot(curve: Curve) -> None:
    """Next to a knot a curve differs from the knot by no more than its steepest slope explains."""
    points = np.array([(0.0, 0.0), *curve.knots])
    steepest = max(curve.tail, *(np.diff(points[:, 1]) / np.diff(points[:, 0])))
    for x, y in curve.knots:
        assert curve(x) == pytest.approx(y)
        for beside in (np.nextafter(x, 0), np.nextafter(x, np.inf)):
            assert abs(curve(beside) - y) <= 2 * steepest * np.spacing(x) + 1e-12 * y


@given(curves(), curves(), st.lists(AMOUNTS, min_size=1, max_size=8))
def test_the_highest_of_two_curves_is_the_larger_at_every_amount(one: Curve, other: Curve, xs: list[float]) -> None:
    highest = one.highest(other)
    for x in [*xs, *(x for x, _ in (*one.knots, *other.knots))]:
        assert highest(x) == pytest.approx(max(one(x), other(x)), rel=1e-6, abs=1e-9)


@given(curves(), st.lists(AMOUNTS, min_size=1, max_size=5), st.floats(0.1, 10))
def test_arrays_give_the_value_of_each_and_scaling_scales(curve: Curve, xs: list[float], factor: float) -> None:
    assert curve(np.array(xs)).tolist() == [curve(x) for x in xs]
    assert curve.scaled(factor)(np.array(xs)) == pytest.approx(factor * curve(np.array(xs)))
