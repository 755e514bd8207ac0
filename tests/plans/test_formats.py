"""Files of older formats are read; a file of today says no more than what they said."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from autoshard.errors import PlanFileError
from autoshard.plans import ShardingPlan, dump_plan, parse_plan, read_plan
from autoshard.plans.text.migrate import MIGRATIONS
from autoshard.plans.text.schema import FORMAT_VERSION
from autoshard.precision import AS_IT_IS

from .synthetic import costed, plans, transformer_plan

FOLDER = Path(__file__).with_name("golden")
OLD = FOLDER / "transformer.format-1.yaml"


def without_the_news_of_format_8(plan: ShardingPlan) -> ShardingPlan:
    """The dtypes of the model, and nothing known of the hardware's peak, of experts or of what memory is made of."""
    memory = plan.memory and replace(plan.memory, kinds=())
    return replace(plan, at_peak_s=None, against=None, precision=AS_IT_IS, memory=memory)


def without_the_news_of_format_5(plan: ShardingPlan) -> ShardingPlan:
    """No price of the optimizer's step, no margin of the allocator; no micro-batches, and nothing travels together."""
    memory = plan.memory and replace(plan.memory, allocator_margin=0.0)
    then = without_the_news_of_format_8(replace(plan, memory=memory))
    return costed(replace(then, optimizer_s=None, bucket_bytes=0))


def without_the_news_of_format_4(plan: ShardingPlan) -> ShardingPlan:
    """Every redistribution takes all steps of its path, or finds the last layout kept."""
    made = {
        (entry.tensor, entry.path) for entry in plan.redistributions if entry.phase == "forward" and not entry.shared
    }
    moved = tuple(e for e in plan.redistributions if not e.shared or (e.kept and (e.tensor, e.path) in made))
    moved = tuple(entry for entry in moved if not entry.kept or len(entry.own) == 1)
    sent_s = math.fsum(entry.predicted_s for entry in moved)
    return without_the_news_of_format_5(replace(plan, redistributions=moved, communication_s=sent_s))


def without_the_news_of_format_3(plan: ShardingPlan) -> ShardingPlan:
    return replace(plan, solver=replace(plan.solver, identical_layers="unknown"))


def without_the_news_of_format_2(plan: ShardingPlan) -> ShardingPlan:
    moved = tuple(replace(entry, consumers=()) for entry in plan.redistributions if not entry.kept)
    return without_the_news_of_format_3(replace(plan, memory=None, execution=(), redistributions=moved))


FORMAT_7 = without_the_news_of_format_8(transformer_plan(4))
FORMAT_4 = without_the_news_of_format_5(FORMAT_7)


def as_format_4(plan: ShardingPlan) -> str:
    """A plan as format 4 wrote it, which knew nothing of the optimizer's time."""
    return dump_plan(plan).replace(f"autoshard_plan: {FORMAT_VERSION}", "autoshard_plan: 4", 1)


def as_format_3(plan: ShardingPlan) -> str:
    """A plan as format 3 wrote it, which did not share steps."""
    return dump_plan(plan).replace(f"autoshard_plan: {FORMAT_VERSION}", "autoshard_plan: 3", 1)


def as_format_2(plan: ShardingPlan) -> str:
    """A plan as format 2 wrote it, which did not say what became of identical layers."""
    lines = dump_plan(plan).splitlines(keepends=True)
    lines.remove(next(line for line in lines if line.startswith("  identical_layers:")))  # a tensor may be called so
    return "".join(lines).replace(f"autoshard_plan: {FORMAT_VERSION}", "autoshard_plan: 2", 1)


def as_format_1(plan: ShardingPlan) -> str:
    """A plan as format 1 wrote it: every operator in one section."""
    lines = as_format_2(plan).splitlines(keepends=True)
    sections = [i for i, line in enumerate(lines) if line.startswith(("followers:", "execution:", "# Entries after"))]
    return "".join(lines[: sections[0]] + lines[sections[-1] :]).replace("autoshard_plan: 2", "autoshard_plan: 1", 1)


def test_a_file_that_format_1_wrote_is_read() -> None:
    today = without_the_news_of_format_2(FORMAT_4)
    then = replace(today, operators=tuple(entry for entry in today.operators if not entry.name.endswith("/add")))
    assert read_plan(OLD) == costed(replace(then, compute_s=0.00119))


def test_a_file_that_format_2_wrote_is_read() -> None:
    assert read_plan(FOLDER / "transformer.format-2.yaml") == without_the_news_of_format_3(FORMAT_4)


def test_a_file_that_format_3_wrote_is_read() -> None:
    assert read_plan(FOLDER / "transformer.format-3.yaml") == FORMAT_4


def test_a_file_that_format_4_wrote_is_read() -> None:
    assert read_plan(FOLDER / "transformer.format-4.yaml") == FORMAT_4


def test_a_file_that_format_5_wrote_is_read() -> None:
    assert read_plan(FOLDER / "transformer.format-5.yaml") == FORMAT_7


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_what_format_1_could_say_is_read_as_it_was(plan: ShardingPlan) -> None:
    held = {entry.name for entry in (*plan.parameters, *plan.buffers, *plan.inputs)}
    then = without_the_news_of_format_2(replace(without_the_news_of_format_4(plan), operators=()))
    moved = tuple(entry for entry in then.redistributions if entry.tensor in held)
    sent_s = math.fsum(entry.predicted_s for entry in moved)
    then = costed(replace(then, redistributions=moved, communication_s=sent_s))
    assert parse_plan(as_format_1(then)) == then


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_what_format_2_could_say_is_read_as_it_was(plan: ShardingPlan) -> None:
    then = without_the_news_of_format_4(plan)
    assert parse_plan(as_format_2(then)) == without_the_news_of_format_3(then)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_what_format_3_could_say_is_read_as_it_was(plan: ShardingPlan) -> None:
    then = without_the_news_of_format_4(plan)
    assert parse_plan(as_format_3(then)) == then


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_what_format_4_could_say_is_read_as_it_was(plan: ShardingPlan) -> None:
    then = without_the_news_of_format_5(plan)
    assert parse_plan(as_format_4(then)) == then


@pytest.mark.parametrize("format", [1, 2, 3, 4, 5])
def test_reading_and_writing_upgrades_a_file(format: int) -> None:
    old = read_plan(FOLDER / f"transformer.format-{format}.yaml")
    text = dump_plan(old)
    assert f"autoshard_plan: {FORMAT_VERSION}\n" in text
    assert parse_plan(text) == old


@pytest.mark.parametrize("section", ["memory", "followers", "execution"])
def test_a_section_of_a_later_format_is_refused(section: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        parse_plan(OLD.read_text() + f"{section}: {{}}\n", source="old.yaml")
    line = OLD.read_text().count("\n") + 1
    assert f"old.yaml, line {line}: {section}: a plan of format 1 has no section {section!r}" in str(caught.value)


def test_a_key_of_a_later_format_is_refused() -> None:
    text = dump_plan(transformer_plan(4)).replace(f"autoshard_plan: {FORMAT_VERSION}", "autoshard_plan: 2", 1)
    with pytest.raises(PlanFileError, match="a plan of format 2 has no key in result 'identical_layers'"):
        parse_plan(text)


def test_shared_steps_in_a_file_of_an_earlier_format_are_refused() -> None:
    text = as_format_3(FORMAT_4).replace("kept: true", "kept: true, shared: 1", 1)
    with pytest.raises(PlanFileError, match="a plan of format 3 has no key in redistributions 'shared'"):
        parse_plan(text)


@pytest.mark.parametrize(("section", "key"), [("result", "optimizer_s"), ("memory", "allocator_margin")])
def test_a_price_of_the_optimizer_or_a_margin_in_a_file_of_format_4_is_refused(section: str, key: str) -> None:
    text = as_format_4(FORMAT_4).replace(f"\n{section}:\n", f"\n{section}:\n  {key}: 0.5\n", 1)
    with pytest.raises(PlanFileError, match=f"a plan of format 4 has no key in {section} '{key}'"):
        parse_plan(text)


def test_micro_batches_in_a_file_of_format_5_are_refused() -> None:
    text = dump_plan(FORMAT_7).replace(f"autoshard_plan: {FORMAT_VERSION}", "autoshard_plan: 5", 1)
    assert parse_plan(text) == FORMAT_7
    with pytest.raises(PlanFileError, match="a plan of format 5 has no section 'micro_batches'"):
        parse_plan(text.replace("\nresult:\n", "\nmicro_batches: 4\nresult:\n", 1))


def test_buckets_in_a_file_of_format_6_are_refused() -> None:
    text = dump_plan(FORMAT_7).replace(f"autoshard_plan: {FORMAT_VERSION}", "autoshard_plan: 6", 1)
    assert parse_plan(text) == FORMAT_7
    with pytest.raises(PlanFileError, match="a plan of format 6 has no section 'bucket_bytes'"):
        parse_plan(text.replace("\nresult:\n", "\nbucket_bytes: 4\nresult:\n", 1))


def test_a_precision_or_a_peak_in_a_file_of_format_7_is_refused() -> None:
    text = dump_plan(FORMAT_7).replace(f"autoshard_plan: {FORMAT_VERSION}", "autoshard_plan: 7", 1)
    assert parse_plan(text) == FORMAT_7
    with pytest.raises(PlanFileError, match="a plan of format 7 has no section 'param_dtype'"):
        parse_plan(text.replace("\nresult:\n", "\nparam_dtype: bfloat16\nresult:\n", 1))
    with pytest.raises(PlanFileError, match="a plan of format 7 has no key in result 'at_peak_s'"):
        parse_plan(text.replace("\nresult:\n", "\nresult:\n  at_peak_s: 0.5\n", 1))
    with pytest.raises(PlanFileError, match="a plan of format 7 has no key in memory 'kinds'"):
        parse_plan(text.replace("\nmemory:\n", "\nmemory:\n  kinds: {activation: [1]}\n", 1))


def test_every_older_format_has_a_way_to_the_present_one() -> None:
    assert sorted(MIGRATIONS) == list(range(1, FORMAT_VERSION))
