"""The JSON Schema that editors use: it accepts what is written, and marks what reading would refuse."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from autoshard.plans import ShardingPlan, dump_plan, read_plan
from autoshard.plans.text.json_schema import plan_schema

from ..thorough import tries
from .synthetic import plans, sharded_plan, transformer_plan
from .write_golden import FOLDER

VALIDATOR = jsonschema.Draft202012Validator(plan_schema())
GOOD = dump_plan(transformer_plan(4))


class Loader(yaml.SafeLoader):
    """What editors read: YAML 1.2, where yes, on and 2026-01-01 are texts."""


Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":bool"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
BOOLEAN = "tag:yaml.org,2002:bool"
Loader.add_implicit_resolver(BOOLEAN, __import__("re").compile("(?:true|false)$"), list("tf"))


def mistakes(text: str) -> list[str]:
    return [error.json_path for error in VALIDATOR.iter_errors(yaml.load(text, Loader))]


def test_the_schema_is_a_schema() -> None:
    VALIDATOR.check_schema(plan_schema())
    json.dumps(plan_schema())


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        dump_plan(sharded_plan(3)),
        *(dump_plan(read_plan(FOLDER / f"llama3_8b{name}.yaml")) for name in ("", "-tight")),
    ],
    ids=["transformer", "sharded", "llama", "llama tight"],
)
def test_what_is_written_fits(text: str) -> None:
    assert mistakes(text) == []


@settings(max_examples=tries(30), suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_every_plan_that_is_written_fits(plan: ShardingPlan) -> None:
    assert mistakes(dump_plan(plan)) == []


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("autoshard_plan: 8", "autoshard_plan: 9", "$.autoshard_plan"),
        ("shape: [256, 256]", "shape: [256, x]", "$.parameters['layers.*.attention.wo.weight'].shape[1]"),
        ("shape: [256, 256]", "size: [256, 256]", "$.parameters['layers.*.attention.wo.weight']"),
        ('layout: "dp:R tp:S(1)"', 'layout: "dp:R tp:S(x)"', "$.parameters['layers.*.attention.wo.weight'].layout"),
        ("gap: 0.0", "gap: none", "$.result.gap"),
        ("objective: step-time\n", "", "$"),
        ("phase: forward, path", "phase: sideways, path", "$.redistributions[0].phase"),
        ("524288 bytes", "524288 B", "$.redistributions[0].collectives[0]"),
        ("kept: true", "kept: maybe", "$.redistributions[1].kept"),
        ("[rms_norm]", "[]", "$.followers.forward[1].roles"),
        ("embedding: 0.0125", "embedding: -1", "$.execution.forward[0]"),
        (" -> dp:S(0) tp:P(sum)", "", "$.operators.forward['layers.*.attention.wo/mm']"),
    ],
)
def test_an_editor_marks_a_mistake_where_it_is(old: str, new: str, place: str) -> None:
    assert old in GOOD
    assert set(mistakes(GOOD.replace(old, new, 1))) == {place}


def test_every_section_is_explained() -> None:
    text = (Path(__file__).parents[2] / "docs" / "plan_file.md").read_text().partition("## Sections")[2]
    undocumented = [name for name in plan_schema()["properties"] if f"`{name}`" not in text]
    assert undocumented == []
