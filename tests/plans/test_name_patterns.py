from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.plans.natural_order import natural_key
from autoshard.plans.text.name_patterns import (
    Line,
    count_repeats,
    fold,
    fold_in_order,
    format_pattern,
    parse_pattern,
    split_name,
)

from .synthetic import names, operator_names


def folded(entries: dict[str, str]) -> dict[str, str]:
    repeats = count_repeats(entries)
    return {format_pattern(line.pattern, repeats): line.value for line in fold(entries.items())}


def test_identical_layers_become_one_line() -> None:
    assert folded({f"layers.{i}.w": "a" for i in range(32)}) == {"layers.*.w": "a"}


def test_a_layer_that_differs_is_cut_out_of_the_range() -> None:
    entries = {f"layers.{i}.w": "b" if i in (0, 4) else "a" for i in range(8)}
    assert folded(entries) == {"layers.{0,4}.w": "b", "layers.{1-3,5-7}.w": "a"}


def test_one_layer_keeps_its_number() -> None:
    assert folded({"layers.0.w": "a"}) == {"layers.0.w": "a"}


def test_several_indices_fold_together() -> None:
    entries = {f"blocks.{b}.experts.{e}.w1": "a" for b in range(12) for e in range(8)}
    assert folded(entries) == {"blocks.*.experts.*.w1": "a"}


def test_a_star_counts_every_index_seen_after_its_path() -> None:
    entries = {f"layers.{i}.w": "a" for i in range(4)} | {f"layers.{i}.moe": "a" for i in range(1, 4)}
    assert folded(entries) == {"layers.*.w": "a", "layers.{1-3}.moe": "a"}


def test_experts_of_layers_that_have_fewer_are_listed() -> None:
    entries = {f"blocks.{b}.experts.{e}.w": "a" for b in range(3) for e in range(2 if b else 1)}
    assert folded(entries) == {"blocks.0.experts.0.w": "a", "blocks.{1-2}.experts.*.w": "a"}


def test_only_components_before_the_slash_fold() -> None:
    entries = {f"layers.{i}.attention/mul.{k}": "a" for i in range(2) for k in range(2)}
    assert folded(entries) == {"layers.*.attention/mul.0": "a", "layers.*.attention/mul.1": "a"}


def test_modules_of_a_sequential_at_the_top_fold() -> None:
    assert folded({"0.weight": "a", "1.weight": "a", "1.bias": "b"}) == {"*.weight": "a", "1.bias": "b"}


@pytest.mark.parametrize(
    "name", ["a.*.b", "a.{0-3}", "{x}.y", "\\a.b", "a.007", "a.1234567", ".", "", "a/b.{0}", "{}.3"]
)
def test_every_name_has_a_pattern_that_means_only_itself(name: str) -> None:
    text = format_pattern(split_name(name)[0], {})
    assert parse_pattern(text, {}).names() == [name]


@given(st.dictionaries(names | operator_names, st.sampled_from("ab"), max_size=30))
def test_unfolding_the_lines_gives_each_entry_once(entries: dict[str, str]) -> None:
    repeats = count_repeats(entries)
    lines = fold(entries.items())
    read = [(parse_pattern(format_pattern(line.pattern, repeats), repeats), line.value) for line in lines]
    unfolded = [(name, value) for pattern, value in read for name in pattern.names()]
    assert sorted(unfolded) == sorted(entries.items())
    assert [pattern.count for pattern, _ in read] == [len(pattern.names()) for pattern, _ in read]


@given(st.dictionaries(names, st.sampled_from("ab"), max_size=30), st.randoms())
def test_the_lines_do_not_depend_on_the_order_of_the_entries(entries: dict[str, str], random: object) -> None:
    shuffled = list(entries.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert fold(shuffled) == fold(entries.items())


@given(st.dictionaries(names, st.sampled_from("ab"), max_size=30))
def test_folding_in_order_keeps_the_order(entries: dict[str, str]) -> None:
    lines: list[Line[str]] = fold_in_order(list(entries.items()))
    assert [(name, line.value) for line in lines for name in line.pattern.names()] == list(entries.items())


def test_folding_in_order_folds_what_lies_together() -> None:
    entries = [("x", "a"), ("cache.0", "a"), ("cache.1", "a"), ("y", "a"), ("cache.2", "a")]
    lines = fold_in_order(entries)
    assert [format_pattern(line.pattern, {}) for line in lines] == ["x", "cache.{0-1}", "y", "cache.2"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers.*.w", "the section repeats has no 'layers'"),
        ("layers.{3-1}.w", "not in ascending order"),
        ("layers.{1,1}.w", "not in ascending order"),
        ("layers.{1-3,2}.w", "not in ascending order"),
        ("layers.{}.w", "write *, {1-31} or {0,3-5} for an index"),
        ("layers.{01}.w", "write *, {1-31} or {0,3-5} for an index"),
        ("layers*.w", "write *, {1-31} or {0,3-5} for an index"),
        (".".join(["{0-1}"] * 9), "more than 8 indices"),
    ],
)
def test_a_pattern_that_cannot_be_read_says_why(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_pattern(text, {})


@given(names, names)
def test_natural_keys_are_equal_only_for_equal_names(one: str, other: str) -> None:
    assert (natural_key(one) == natural_key(other)) == (one == other)


def test_numbers_in_names_order_as_numbers() -> None:
    ordered = ["layers.2.w", "layers.10.w", "layers.10.w/mul.2", "layers.10.w/mul.11"]
    turned = ordered[::-1]
    assert sorted(turned, key=natural_key) == ordered
