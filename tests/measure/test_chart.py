"""Laws of the charts: what is larger stands further along its axis, and a tick stands where its value does."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from autoshard.measure.chart import Panel, Scale, spanning

VALUES = st.floats(1e-6, 1e12)


@given(st.lists(VALUES, min_size=2, unique=True))
def test_larger_values_stand_further_along_and_all_have_room(values: list[float]) -> None:
    scale = spanning(values, 10.0, 210.0)
    places = [scale.at(value) for value in sorted(values)]
    assert all(one <= other for one, other in pairwise(places))
    assert places[0] > 10.0 and places[-1] < 210.0


def test_a_value_beyond_an_axis_stands_at_its_end() -> None:
    scale = Scale(-1.0, 1.0, 100.0, 0.0, logarithmic=False)
    assert [scale.at(value) for value in (-3.0, 0.0, 2.0)] == [100.0, 50.0, 0.0]


@given(VALUES, st.floats(2, 1e9))
def test_ticks_stand_within_the_axis_and_there_are_some(low: float, times: float) -> None:
    scale = spanning((low, low * times), 0.0, 300.0)
    ticks = scale.ticks()
    assert ticks and all(0 <= tick.at <= 300 for tick in ticks)
    assert len({tick.label for tick in ticks}) == len(ticks)


def test_ticks_are_named_by_their_values() -> None:
    assert [tick.label for tick in spanning((1024, 1e6), 0, 300).ticks()] == ["10³", "10⁴", "10⁵", "10⁶"]
    assert [tick.label for tick in spanning((12, 40), 0, 300).ticks()] == ["10", "20", "50"]
    assert [tick.label for tick in Scale(-1, 1, 0, 300, logarithmic=False).ticks()] == ["-1", "0", "1"]


def test_a_line_goes_through_its_dots() -> None:
    panel = Panel(spanning((1, 100), 0, 300), spanning((1, 100), 300, 0))
    dots = [panel.dot(value, value, "fitted", "#000") for value in (1, 10, 100)]
    assert panel.line([(1, 1), (10, 10), (100, 100)], "#000").points == " ".join(f"{dot.x},{dot.y}" for dot in dots)
