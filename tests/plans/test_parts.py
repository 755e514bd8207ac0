"""Cuts of each part of a dim, as plans, schemas and exports write them."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

import autoshard
from autoshard.errors import LayoutError
from autoshard.layout import (
    Layout,
    R,
    S,
    check_fits,
    format_layout,
    is_possible,
    local_range,
    local_ranges,
    local_shape,
    parse_layout,
    parse_placement,
)
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan
from autoshard.plans.views.exports import parallelize_module_source, partition_spec, partition_spec_source

from ..models import EXAMPLES

SCHEMA = Path(__file__).parents[2] / "docs" / "plan.schema.json"


@cache
def planned(name: str) -> ShardingPlan:
    pins = ["layers.*.attention.qkv/mm=tp:S(1/4:1:1)"] if name == "fused 4:1:1" else []
    constraints = [] if pins else ["baseline tp"]
    model, args = EXAMPLES[name]()
    return autoshard.plan(model, args, mesh="tp=2", hardware="cpu-gloo", pins=pins, constraints=constraints)


@pytest.mark.parametrize("text", ["S(0/3)", "S(2/4:1:1)", "S(1/64)", "S(12)"])
def test_a_placement_is_read_as_it_is_written(text: str) -> None:
    assert str(parse_placement(text)) == text


def test_proportions_are_in_lowest_terms_and_one_part_is_none() -> None:
    assert S(1, (768, 768, 768)) == S(1, (1, 1, 1)) == parse_placement("S(1/3)") == parse_placement("S(1/5:5:5)")
    assert S(1, (7,)) == S(1)


@pytest.mark.parametrize("text", ["S(0/1)", "S(0/0)", "S(0/65)", "S(0/1:0)", "S(0/3:)", "S(/3)", "S(0/999999999)"])
def test_other_parts_are_refused(text: str) -> None:
    with pytest.raises(LayoutError, match="cannot read"):
        parse_placement(text)


def test_a_rank_holds_its_block_of_every_part() -> None:
    mesh, layout = Mesh.parse("a=2"), Layout((S(0, (4, 1, 1)),))
    assert local_ranges(24, layout, 0, mesh, (1,)) == [(8, 16), (18, 20), (22, 24)]
    assert local_shape((24, 5), layout, mesh, (1,)) == (12, 5)
    with pytest.raises(LayoutError, match="no single range"):
        local_range(24, layout, 0, mesh, (1,))


@pytest.mark.parametrize(
    ("text", "shape"),
    [("a:S(0/3)", (8,)), ("a:S(0/3)", (9,)), ("a:S(0/3) b:S(0)", (36,)), ("b:S(1/2) a:S(1/2)", (1, 8))],
)
def test_parts_that_ranks_cannot_share_alike_are_no_layout(text: str, shape: tuple[int, ...]) -> None:
    mesh = Mesh.parse("a=2,b=2")
    with pytest.raises(LayoutError):
        check_fits(parse_layout(text, mesh), shape, mesh)


def test_axes_that_cut_one_dim_cut_the_same_parts_but_for_outer_ones_that_cut_it_as_one() -> None:
    mesh = Mesh.parse("a=2,b=2")
    nested = parse_layout("a:S(0/3) b:S(0/3)", mesh)
    assert is_possible((36,), nested, mesh) and not is_possible((30,), nested, mesh)
    outer = parse_layout("a:S(0) b:S(0/3)", mesh)
    assert is_possible((36,), outer, mesh) and not is_possible((18,), outer, mesh)
    assert not is_possible((36,), Layout((S(0, (1, 1, 1)), S(0))), mesh)


@pytest.mark.parametrize("name", ["fused", "fused 4:1:1"])
def test_a_plan_with_parts_is_read_as_it_is_written_and_says_what_they_are(name: str) -> None:
    plan = planned(name)
    text = autoshard.dump_plan(plan)
    assert autoshard.parse_plan(text) == plan
    assert "\n# S(0/3)  " in text and "\n# S(0/3)  " not in autoshard.dump_plan(_without_parts())
    patterns = {json.loads(found) for found in re.findall(r'"pattern": (".*")', SCHEMA.read_text())}
    (pattern,) = (found for found in patterns if "P\\(" in found)
    found = {layout for entry in plan.operators for layout in (*entry.inputs, *entry.outputs) if layout}
    assert any(layout.has_parts for layout in found)
    assert all(re.match(pattern, format_layout(layout, plan.mesh)) for layout in found)


@cache
def _without_parts() -> ShardingPlan:
    model, args = EXAMPLES["llama"]()
    return autoshard.plan(model, args, mesh="tp=2", hardware="cpu-gloo", constraints=["baseline tp"])


def test_exports_place_parts_where_the_other_system_can() -> None:
    plan = planned("fused")
    source = parallelize_module_source(plan)
    assert "_StridedShard(0, split_factor=3)" in source and "import _StridedShard\n" in source
    assert "_StridedShard" not in parallelize_module_source(_without_parts())
    compile(source, "parallelize", "exec")
    listed = partition_spec_source(plan).partition("INEXPRESSIBLE = (")[2]
    assert "'layers.0.attention.qkv.weight'" in listed and "'layers.0.down.weight'" not in listed
    with pytest.raises(ValueError, match="in parts"):
        partition_spec(Layout((S(0, (1, 1)), R)), 1, Mesh.parse("a=2,b=2"))
