"""Laws of the folded order of execution and of relative names."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.plans import Execution, OperatorEntry
from autoshard.plans.text.execution_order import (
    Loop,
    Run,
    check_execution,
    count_executed,
    fold_execution,
    format_loop,
    format_ns,
    parse_loop,
    unfold_execution,
)
from autoshard.plans.text.layer_relative import (
    absolute_name,
    absolute_names,
    frame_of,
    relative_name,
    relative_patterns,
)
from autoshard.plans.text.name_patterns import count_repeats

from ..thorough import tries
from .synthetic import names, operator_names

times = st.sampled_from([0, 1, 2_500, 10**18])
paths = st.lists(st.sampled_from(["a", "0", "1", "2", "3", "007", "*", "*+1", "\\*", "{0-1}"]), max_size=6).map(
    ".".join
)


@settings(max_examples=tries(300))
@given(st.lists(st.tuples(st.tuples(paths, st.sampled_from("xyz")).map("/".join), times), unique_by=lambda e: e[0]))
def test_unfolding_gives_back_any_order(entries: list[tuple[str, int]]) -> None:
    block = fold_execution(entries)
    assert list(unfold_execution(block)) == entries
    assert count_executed(block) == len(entries)


@given(st.lists(st.tuples(operator_names, times), unique_by=lambda e: e[0]))
def test_unfolding_gives_back_any_names(entries: list[tuple[str, int]]) -> None:
    assert list(unfold_execution(fold_execution(entries))) == entries


@pytest.mark.parametrize("layers", [2, 3, 80])
def test_layers_run_in_a_loop_up_and_down(layers: int) -> None:
    up = [(f"layers.{i}.{name}", 5) for i in range(layers) for name in ("norm/mul", "norm/add", "wq/mm")]
    down = [(f"layers.{i}.{name}", 5) for i in reversed(range(layers)) for name in ("wq/mm.1", "norm/mul.1")]
    assert fold_execution([("embed/x", 1), *up]) == (
        Run("embed", (("x", 1),)),
        Loop(
            "layers", 0, layers - 1, (Run("layers.*.norm", (("mul", 5), ("add", 5))), Run("layers.*.wq", (("mm", 5),)))
        ),
    )
    (loop,) = fold_execution(down)
    assert isinstance(loop, Loop) and (loop.first, loop.last, len(loop.body)) == (layers - 1, 0, 2)


def test_an_operator_of_the_next_layer_inside_a_round_is_relative() -> None:
    entries = [(f"layers.{i + k}/{role}", 1) for i in range(8) for k, role in ((0, "a"), (1, "b"))]
    assert fold_execution(entries) == (
        Loop("layers", 0, 7, (Run("layers.*", (("a", 1),)), Run("layers.*+1", (("b", 1),)))),
    )


def test_loops_inside_loops_fold_too() -> None:
    entries = [(f"blocks.{i}.experts.{j}.w{k}/mm", 1) for i in range(6) for j in range(8) for k in range(3)]
    (outer,) = fold_execution(entries)
    assert isinstance(outer, Loop) and outer.prefix == "blocks"
    (inner,) = outer.body
    assert isinstance(inner, Loop) and (inner.prefix, len(inner.body)) == ("blocks.*.experts", 3)


def test_a_layer_that_takes_another_time_is_no_part_of_the_loop() -> None:
    entries = [(f"layers.{i}/mm", 7 if i == 4 else 5) for i in range(8)]
    assert [format_loop(part) for part in fold_execution(entries) if isinstance(part, Loop)] == [
        "layers from 0 to 3",
        "layers from 5 to 7",
    ]


@given(st.integers(0, 10**18))
def test_nanoseconds_in_milliseconds_are_exact(ns: int) -> None:
    assert int(Decimal(format_ns(ns)).scaleb(6)) == ns
    assert "E" not in format_ns(ns)


@given(st.text(max_size=10), st.integers(0, 999_999), st.integers(0, 999_999))
def test_the_head_of_a_loop_is_read_back(prefix: str, first: int, last: int) -> None:
    loop = Loop(prefix, first, last, (Run("x", (("y", 1),)),))
    assert parse_loop(format_loop(loop), loop.body) == loop


@given(names | operator_names | paths, names | operator_names | paths)
def test_a_relative_name_is_read_back(name: str, other: str) -> None:
    frame = frame_of(other)
    assert absolute_names(relative_name(name, frame), frame, {}) == [name]


@given(st.lists(names | operator_names | paths, unique=True, max_size=6), names | operator_names | paths)
def test_relative_patterns_name_what_they_were_made_of(several: list[str], other: str) -> None:
    frame, repeats = frame_of(other), count_repeats([*several, other])
    texts = relative_patterns(several, frame, repeats)
    assert sorted(name for text in texts for name in absolute_names(text, frame, repeats)) == sorted(several)


def test_names_are_relative_to_the_layer_they_are_said_of() -> None:
    frame = frame_of("layers.3.wo/mm")
    assert relative_name("layers.4.norm/mul", frame) == "layers.*+1.norm/mul"
    assert absolute_name("layers.*-1.norm/mul", frame) == "layers.2.norm/mul"
    assert relative_name("heads.4/mul", frame) == "heads.4/mul"
    with pytest.raises(ValueError, match="there is no such layer"):
        absolute_name("layers.*-4/mul", frame)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (["a/x", "a/x", "a/y"], "runs twice"),
        (["a/x"], "'a/y' of the forward has a strategy, but never runs"),
        (["a/x", "a/y", "a/z"], "'a/z' of the forward runs, but has no strategy"),
    ],
)
def test_an_execution_runs_every_operator_once(run: list[str], said: str) -> None:
    operators = [OperatorEntry(name, "forward", (), ()) for name in ("a/x", "a/y")]
    with pytest.raises(ValueError, match=said):
        check_execution([Execution(name, "forward", 1) for name in run], operators)
    check_execution([], operators)
