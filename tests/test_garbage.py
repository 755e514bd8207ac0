"""Searches for garbage: seldom inside, as before outside, and what is in cycles is freed all the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from autoshard.garbage import RARELY, at_the_end_of_the_process, seldom_collected


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_searches_are_seldom_inside_and_as_before_outside_errors_included() -> None:
    gc.set_threshold(701, 11, 12)
    with pytest.raises(KeyError), seldom_collected():
        assert gc.get_threshold() == (RARELY, 11, 12)
        with seldom_collected():
            assert gc.get_threshold() == (RARELY, 11, 12)
        assert gc.get_threshold() == (RARELY, 11, 12)
        raise KeyError
    assert gc.get_threshold() == (701, 11, 12)


@pytest.mark.parametrize("own", [0, RARELY + 1])
def test_who_searches_more_seldom_or_never_is_left_alone(own: int) -> None:
    gc.set_threshold(own, 10, 10)
    with seldom_collected():
        assert gc.get_threshold() == (own, 10, 10)


def test_cycles_are_freed_inside_too() -> None:
    with seldom_collected():
        gone = weakref.ref(Cycle())
        kept = [[] for _ in range(RARELY + 1)]  # type: ignore[var-annotated]
    assert gone() is None
    assert len(kept) > RARELY


def test_what_is_there_at_the_end_of_the_process_is_not_searched_errors_included() -> None:
    try:
        with pytest.raises(KeyError), at_the_end_of_the_process():
            gone = weakref.ref(Cycle())
            raise KeyError
        gc.collect()
        assert gone() is not None
    finally:
        gc.unfreeze()
    gc.collect()
    gc.freeze()  # as tests/conftest.py has it
    assert gone() is None
