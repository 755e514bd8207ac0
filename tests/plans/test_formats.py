"""Files of older formats are read; a file of today says no more than what they said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from autoshard.errors import PlanFileError
from autoshard.plans import ShardingPlan, dump_plan, parse_plan, read_plan
from autoshard.plans.migrate import MIGRATIONS
from autoshard.plans.schema import FORMAT_VERSION

from .synthetic import plans, transformer_plan

OLD = Path(__file__).with_name("golden") / "transformer.format-1.yaml"


def without_the_news_of_format_2(plan: ShardingPlan) -> ShardingPlan:
    moved = tuple(replace(entry, consumers=()) for entry in plan.redistributions if not entry.kept)
    return replace(plan, memory=None, execution=(), redistributions=moved)


def as_format_1(plan: ShardingPlan) -> str:
    """A plan as format 1 wrote it: every operator in one section."""
    lines = dump_plan(plan).splitlines(keepends=True)
    sections = [i for i, line in enumerate(lines) if line.startswith(("followers:", "execution:", "# Entries after"))]
    return "".join(lines[: sections[0]] + lines[sections[-1] :]).replace("autoshard_plan: 2", "autoshard_plan: 1", 1)


def test_a_file_that_format_1_wrote_is_read() -> None:
    today = without_the_news_of_format_2(transformer_plan(4))
    then = replace(today, operators=tuple(entry for entry in today.operators if not entry.name.endswith("/add")))
    assert read_plan(OLD) == replace(then, compute_s=0.00119, communication_s=4.4567e-05)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_what_format_1_could_say_is_read_as_it_was(plan: ShardingPlan) -> None:
    then = replace(without_the_news_of_format_2(plan), operators=())
    assert parse_plan(as_format_1(then)) == then


def test_reading_and_writing_upgrades_a_file() -> None:
    text = dump_plan(read_plan(OLD))
    assert f"autoshard_plan: {FORMAT_VERSION}\n" in text
    assert parse_plan(text) == read_plan(OLD)


@pytest.mark.parametrize("section", ["memory", "followers", "execution"])
def test_a_section_of_a_later_format_is_refused(section: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        parse_plan(OLD.read_text() + f"{section}: {{}}\n", source="old.yaml")
    line = OLD.read_text().count("\n") + 1
    assert f"old.yaml, line {line}: {section}: a plan of format 1 has no section {section!r}" in str(caught.value)


def test_every_older_format_has_a_way_to_the_present_one() -> None:
    assert sorted(MIGRATIONS) == list(range(1, FORMAT_VERSION))
