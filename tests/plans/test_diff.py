from __future__ import annotations

import io
import json
import random
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from autoshard.layout import format_layout, replicated
from autoshard.plans import ShardingPlan, TensorEntry
from autoshard.plans.text.name_patterns import count_repeats, parse_pattern
from autoshard.plans.views.diff import ABSENT, PlanDiff, diff_json, diff_plans
from autoshard.plans.views.diff_text import SAME, diff_markdown, print_diff
from autoshard.plans.views.parallelism import Parallelism

from ..thorough import tries
from .synthetic import layout, plans, sharded_plan, transformer_plan
from .test_report import HOSTILE, hostile_plan
from .write_golden import FOLDER, llama_markdown

PLAN, SHARDED = transformer_plan(4), sharded_plan(4)


def printed(diff: PlanDiff) -> str:
    stream = io.StringIO()
    print_diff(diff, Console(file=stream, width=4000))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("times_s", "said"),
    [
        ((0.0018396070175438596, 0.10403734296774193), ("1.84 ms", "104 ms")),
        ((0.25, 0.25 + 1e-9), ("0.25 s", "0.250000001 s")),
        ((None, 0.5), (ABSENT, "500 ms")),
    ],
)
def test_the_arithmetic_at_the_peak_has_as_many_digits_as_tell_it_apart(
    times_s: tuple[float | None, float], said: tuple[str, str]
) -> None:
    old, new = (replace(PLAN, at_peak_s=time_s) for time_s in times_s)
    (fact,) = [fact for fact in diff_plans(old, new).facts if fact.name == "arithmetic at the peak"]
    assert (fact.before, fact.after) == said


@settings(max_examples=tries(50), suppress_health_check=[HealthCheck.too_slow])
@given(plans(), plans())
def test_a_difference_is_found_exactly_where_there_is_one(old: ShardingPlan, new: ShardingPlan) -> None:
    assert diff_plans(old, old).same
    diff = diff_plans(old, new)
    assert diff.same == (old == new)
    if not diff.same:
        said = diff.facts or diff.placements or diff.operators or diff.collectives or diff.moves or diff.other
        assert said or any(number.before != number.after for number in diff.numbers)
    json.dumps(diff_json(diff))
    assert printed(diff) and diff_markdown(diff, "old", "new")


def test_pins_that_read_the_same_are_told_apart() -> None:
    plan = replace(sharded_plan(4), pins=("a", "b"))
    assert [fact.name for fact in diff_plans(plan, replace(plan, pins=("a; b",))).facts] == ["pins"]


@settings(max_examples=tries(30), suppress_health_check=[HealthCheck.too_slow])
@given(plans(), st.randoms(use_true_random=False))
def test_the_changes_of_placements_are_those_of_the_entries(plan: ShardingPlan, shuffler: random.Random) -> None:
    """Applied to the old layouts, the listed changes give the new ones: none is missing, none is made up."""
    whole = replicated(plan.mesh)
    changed = tuple(replace(e, layout=whole) if shuffler.random() < 0.5 else e for e in plan.parameters)
    new = replace(plan, parameters=changed)
    layouts = {entry.name: format_layout(entry.layout, plan.mesh) for entry in plan.parameters}
    expected = {entry.name: format_layout(entry.layout, plan.mesh) for entry in changed}
    for change in diff_plans(plan, new).placements:
        for pattern in change.patterns:
            for name in parse_pattern(pattern, _all_repeats(plan)).names():
                assert layouts[name] == change.before
                layouts[name] = change.after
    assert layouts == expected


def _all_repeats(plan: ShardingPlan) -> dict[str, int]:
    entries = (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs, *plan.operators)
    return count_repeats([*(entry.name for entry in entries), *(entry.tensor for entry in plan.redistributions)])


def test_added_and_removed_tensors_are_changes_from_and_to_nothing() -> None:
    extra = TensorEntry("head.weight", (4,), "float32", layout(""))
    (change,) = diff_plans(PLAN, replace(PLAN, parameters=(*PLAN.parameters, extra))).placements
    assert (change.before, change.after, change.patterns) == (ABSENT, "dp:R tp:R", ("head.weight",))
    (change,) = diff_plans(replace(PLAN, parameters=(*PLAN.parameters, extra)), PLAN).placements
    assert (change.before, change.after) == ("dp:R tp:R", ABSENT)


def test_collectives_before_and_after_are_those_of_the_plans() -> None:
    changes = {(c.phase, c.kind, c.axis): c for c in diff_plans(PLAN, SHARDED).collectives}
    reduce, scatter = changes["backward", "all_reduce", "dp"], changes["backward", "reduce_scatter", "dp"]
    assert (reduce.before_count, reduce.after_count, reduce.before_bytes) == (4, 0, 4 << 17)
    assert (scatter.before_count, scatter.after_count, scatter.after_bytes) == (0, 4, 4 << 17)
    assert ("forward", "all_reduce", "tp") not in changes  # the same in both


def test_what_moved_is_what_is_not_in_both() -> None:
    moves = diff_plans(PLAN, SHARDED).moves
    assert {(move.change, move.pattern) for move in moves} == {
        ("removed", "layers.*.attention.wq/mm.1"),
        ("added", "layers.*.attention.wq/mm.1"),
        ("added", "layers.*.attention.wq.weight"),
        ("added", "layers.*.attention.wo.weight"),
    }
    assert [move.predicted_s for move in moves] == sorted((move.predicted_s for move in moves), reverse=True)


# In words -----------------------------------------------------------------------------------------------------------


def test_going_fully_sharded_is_named() -> None:
    words = "\n".join(diff_plans(PLAN, SHARDED).words)
    assert "dp: 60% replicated, 40% data parallel -> 80% fully sharded, 20% replicated" in words
    assert (
        "layers.*.attention.wq.weight): now cut over dp (dim 1) and gathered before use; gradients reduce-scattered "
        "instead of all-reduced (data parallel -> fully sharded)"
    ) in words
    back = "\n".join(diff_plans(SHARDED, PLAN).words)
    assert "now whole along dp, no longer gathered; gradients all-reduced instead of reduce-scattered" in back


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("", "tp:S(0)", "now cut over tp (dim 0) and used cut (replicated -> tensor parallel)"),
        ("tp:S(0)", "", "now whole along tp (tensor parallel -> replicated)"),
        ("tp:S(0)", "tp:S(1)", "cut over tp in dim 1 instead of 0"),
    ],
)
def test_a_change_without_gathers_is_named(before: str, after: str, said: str) -> None:
    old, new = (
        replace(PLAN, parameters=(TensorEntry("w", (4, 4), "float32", layout(text)),), redistributions=())
        for text in (before, after)
    )
    assert any(word == f"w: {said}" for word in diff_plans(old, new).words)


def test_a_weight_gathered_after_its_transpose_is_gathered() -> None:
    """Some plans gather ``wq.weight`` as ``wq/t``; an activation of the module is not mistaken for it."""
    entry = TensorEntry("m.weight", (256, 128), "float32", layout("dp:S(0)"))
    copy = replace(PLAN.operators[0], name="m/t", inputs=(layout("dp:S(0)"),), outputs=(layout("dp:S(1)"),))
    moved = replace(
        PLAN.redistributions[0],
        tensor="m/t",
        path=(layout("dp:S(1)"), layout("")),
        collectives=(replace(SHARDED.redistributions[0].collectives[0], kind="all_gather", axis="dp"),),
    )
    for size, use in ((256 * 128 * 4, "gathered"), (256 * 128 * 2, "cut")):
        sized = replace(moved, collectives=(replace(moved.collectives[0], size_bytes=size),))
        plan = replace(PLAN, parameters=(entry,), operators=(copy,), redistributions=(sized,), execution=())
        assert Parallelism(plan).of(entry, "dp").use == use


def test_llama_with_less_memory_fits_on_a_page_and_is_named() -> None:
    text = llama_markdown()
    assert text == (FOLDER / "llama3_8b.diff.md").read_text()
    assert len(text.splitlines()) <= 60
    assert "cut over tp in dim 1 instead of 0; gradients no longer reduce-scattered over tp" in text
    assert "memory budget: 80 GiB -> 26 GiB" in text


def test_a_long_difference_is_cut_to_a_page_and_counted() -> None:
    many = tuple(TensorEntry(f"t{'x' * i}.w", (4, 4), "float32", layout("tp:S(0)")) for i in range(40))
    other = tuple(replace(e, layout=layout(("tp:S(1)", "dp:S(0)", "dp:S(1)", "")[i % 4])) for i, e in enumerate(many))
    old, new = (replace(PLAN, parameters=entries) for entries in (many, other))
    diff = diff_plans(old, new)
    assert sum(change.count for change in diff.placements) == 40
    assert len(diff_markdown(diff, "a", "b").splitlines()) <= 60


# As text ------------------------------------------------------------------------------------------------------------


def test_equal_plans_are_said_to_be_so() -> None:
    assert SAME in diff_markdown(diff_plans(PLAN, PLAN), "a", "b")
    assert printed(diff_plans(PLAN, PLAN)) == f"{SAME}\n"


def test_a_name_is_no_markup_in_markdown() -> None:
    text = diff_markdown(diff_plans(PLAN, hostile_plan()), HOSTILE, "`` @all | a")
    outside_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    assert "<script" not in outside_code.replace("\\<", "")
    assert not re.search(r"(?<!\\)@", outside_code)
    tables = [line for line in text.splitlines() if line.startswith("|")]
    cells = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    heads = {cells[i] for i, line in enumerate(tables) if set(line) <= set("|-:")}
    assert set(cells) == heads


@pytest.mark.parametrize("width", [60, 120])
def test_a_terminal_gets_lines_that_fit(width: int) -> None:
    stream = io.StringIO()
    print_diff(diff_plans(PLAN, SHARDED), Console(file=stream, width=width))
    assert max(map(len, stream.getvalue().splitlines())) <= width
