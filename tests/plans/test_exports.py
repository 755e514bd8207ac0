"""Exports as text: valid Python whatever the names, and nothing said that the target cannot express."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from autoshard.layout import P_SUM, Layout, R, S
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan, TensorEntry
from autoshard.plans.views.exports import parallelize_module_source, partition_spec, partition_spec_source

from ..thorough import tries
from .synthetic import layout, plans, transformer_plan
from .test_report import HOSTILE

MESH = Mesh.parse("a=2,b=2,c=2")


@settings(max_examples=tries(50), suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_every_plan_exports_valid_python(plan: ShardingPlan) -> None:
    for source in (parallelize_module_source(plan), partition_spec_source(plan)):
        ast.parse(source)


@settings(max_examples=tries(50), suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_every_name_finds_its_own_partition_spec(plan: ShardingPlan) -> None:
    entries = (*plan.parameters, *plan.buffers, *plan.inputs, *plan.outputs)
    if len({entry.name for entry in entries}) < len(entries):
        return  # a parameter and an input of one name
    exported = run(partition_spec_source(plan))
    partial = {entry.name for entry in entries if entry.layout.has_partial}
    assert set(exported["INEXPRESSIBLE"]) == partial
    for entry in entries:
        if entry.name not in partial:
            assert exported["spec_of"](entry.name) == partition_spec(entry.layout, len(entry.shape), plan.mesh)


def run(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(source, "exported.py", "exec"), names)
    return names


def test_a_hostile_name_is_text_in_the_source() -> None:
    plan = replace(transformer_plan(1), model=f'{HOSTILE}\n"""\nraise SystemExit\n# ', buffers=())
    odd = tuple(replace(entry, name=f"{HOSTILE}'\n.{entry.name}") for entry in plan.parameters)
    for source in (parallelize_module_source, partition_spec_source):
        tree = ast.parse(source(replace(plan, parameters=odd)))
        kinds = {type(statement).__name__ for statement in tree.body}
        assert kinds <= {"Import", "ImportFrom", "Assign", "FunctionDef", "ClassDef"}


@pytest.mark.parametrize(
    ("placements", "dims", "spec"),
    [
        ((R, R, R), 2, (None, None)),
        ((S(0), R, R), 2, ("a", None)),
        ((S(1), S(0), R), 2, ("b", "a")),
        ((S(0), S(0), S(1)), 3, (("a", "b"), "c", None)),
        ((R, R, R), 0, ()),
    ],
)
def test_a_partition_spec_names_the_axes_of_each_dim_outermost_first(
    placements: tuple[Any, ...], dims: int, spec: tuple[Any, ...]
) -> None:
    assert partition_spec(Layout(placements), dims, MESH) == spec


def test_addends_have_no_partition_spec() -> None:
    with pytest.raises(ValueError, match="cannot express addends"):
        partition_spec(Layout((P_SUM, R, R)), 1, MESH)
    plan = replace(transformer_plan(1), outputs=(TensorEntry("loss", (), "float32", layout("dp:P(sum)")),))
    assert run(partition_spec_source(plan))["INEXPRESSIBLE"] == ("loss",)


def test_a_layer_of_its_own_has_a_line_of_its_own() -> None:
    plan = transformer_plan(4)
    changed = tuple(
        replace(e, layout=layout("dp:S(0) tp:S(0)")) if e.name == "layers.2.attention.wq.weight" else e
        for e in plan.parameters
    )
    source = parallelize_module_source(replace(plan, parameters=changed))
    assert re.findall(r"'(layers\.\S+wq)'", source) == [f"layers.{i}.attention.wq" for i in (0, 1, 3, 2)]
    specs = run(partition_spec_source(replace(plan, parameters=changed)))
    assert specs["spec_of"]("layers.2.attention.wq.weight") == (("dp", "tp"), None)
    assert specs["spec_of"]("layers.3.attention.wq.weight") == ("tp", None)


def test_a_glob_matches_no_module_that_is_no_layer() -> None:
    names = ("m.0.weight", "m.1.weight", "m.shared.weight", "m.007.weight")
    cuts = (layout("tp:S(0)"), layout("tp:S(0)"), layout("tp:S(1)"), layout("dp:S(0)"))
    parameters = tuple(TensorEntry(name, (4, 4), "float32", cut) for name, cut in zip(names, cuts))
    plan = replace(transformer_plan(1), parameters=parameters, buffers=())
    assert re.findall(r"'(m\.\S+)'", parallelize_module_source(plan)) == ["m.0", "m.1", "m.007", "m.shared"]
    specs = run(partition_spec_source(plan))
    assert [specs["spec_of"](name) for name in names] == [("tp", None), ("tp", None), (None, "tp"), ("dp", None)]
