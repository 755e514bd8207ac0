from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.errors import PlanFileError
from autoshard.layout import Layout, R, S
from autoshard.plans import Collective, OperatorEntry, Redistribution, ShardingPlan, dump_plan, parse_plan
from autoshard.plans.memory_outcome import MemoryPoint
from autoshard.plans.text.notation import format_collective, parse_collective
from autoshard.plans.text.schema import FORMAT_VERSION

from .synthetic import costed, plans, seconds, transformer_plan

GOLDEN = Path(__file__).with_name("golden")
DOCUMENT = Path(__file__).parents[2] / "docs" / "plan_file.md"


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_parsing_the_dump_gives_the_plan(plan: ShardingPlan) -> None:
    again = parse_plan(dump_plan(plan))
    assert again == plan and again.mesh.order == plan.mesh.order  # which meshes do not compare


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plans())
def test_the_pure_python_reader_reads_the_same(plan: ShardingPlan) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(yaml, "CSafeLoader", raising=False)
        assert parse_plan(dump_plan(plan)) == plan


@pytest.mark.parametrize("name", ["A,", "a,b", "a,,b", "a{0,1}", "{a", "a}", "a{", "plain/role.1"])
@pytest.mark.parametrize("reader", [yaml.SafeLoader, getattr(yaml, "CSafeLoader", yaml.SafeLoader)])
def test_a_name_with_commas_or_braces_is_read_back_between_braces(name: str, reader: type) -> None:
    plan = transformer_plan(2)
    assert plan.memory is not None
    name = name if "/" in name else f"{name}/mm"
    operators = (*plan.operators, OperatorEntry(name, "forward", (), ()))
    points = (MemoryPoint("forward", name, 7), plan.memory.peak)
    plan = replace(plan, operators=operators, execution=(), memory=replace(plan.memory, timeline=points, kinds=()))
    assert parse_plan(dump_plan(plan)) == plan
    assert yaml.load(dump_plan(plan), reader)["memory"]["timeline"][0] == {"forward": {name: 7}}


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(plans(), st.randoms(use_true_random=False))
def test_the_order_of_entries_does_not_change_the_bytes(plan: ShardingPlan, shuffler: random.Random) -> None:
    shuffled = {
        field: tuple(shuffler.sample(getattr(plan, field), len(getattr(plan, field))))
        for field in ("parameters", "buffers", "operators", "redistributions")
    }
    again = replace(plan, **shuffled)
    assert again == plan
    assert dump_plan(again).encode() == dump_plan(plan).encode()


@given(seconds)
def test_times_in_milliseconds_are_exact(time_s: float) -> None:
    collective = Collective("all_gather", "dp", 1, time_s)
    assert parse_collective(format_collective(collective)) == collective


@pytest.mark.parametrize("time_s", [0.0, 5e-324, 1e9, 0.1 + 0.2, 1e-05, 123456789.125])
def test_times_at_the_ends_of_the_range_are_exact(time_s: float) -> None:
    plan = costed(replace(transformer_plan(1), compute_s=time_s, execution=()))
    assert parse_plan(dump_plan(plan)).compute_s == time_s


def test_other_yaml_readers_see_numbers_as_numbers() -> None:
    document = yaml.safe_load(dump_plan(transformer_plan(4)))
    assert document["autoshard_plan"] == FORMAT_VERSION
    assert document["result"]["cost_ns"] == transformer_plan(4).solver.cost_ns
    assert document["result"]["communication_s"] == transformer_plan(4).communication_s
    assert document["parameters"]["layers.*.norm.weight"]["shape"] == [256]


@given(seconds)
def test_other_yaml_readers_see_every_time_as_a_number(time_s: float) -> None:
    plan = costed(replace(transformer_plan(1), compute_s=time_s, execution=()))
    document = yaml.safe_load(dump_plan(plan))
    assert document["result"]["compute_s"] == time_s


@pytest.mark.parametrize("layers", [3, 32, 126])
def test_the_file_does_not_grow_with_identical_layers(layers: int) -> None:
    short, long = dump_plan(transformer_plan(2)), dump_plan(transformer_plan(layers))
    number = r"\d+(\.\d+)?(e-\d+)?"
    assert re.sub(number, "N", short) == re.sub(number, "N", long)


def test_a_plan_without_entries_is_read_back() -> None:
    empty: dict[str, tuple[()]] = dict.fromkeys(
        ("pins", "parameters", "buffers", "inputs", "outputs", "operators", "redistributions", "execution"), ()
    )
    plan = costed(replace(transformer_plan(1), communication_s=0.0, memory=None, **empty))  # type: ignore[arg-type]
    assert parse_plan(dump_plan(plan)) == plan


def test_inputs_and_outputs_keep_their_order() -> None:
    plan = transformer_plan(1)
    turned = replace(plan, inputs=tuple(reversed(plan.inputs)))
    assert turned != plan
    assert parse_plan(dump_plan(turned)).inputs == turned.inputs


def _broken() -> list[tuple[ShardingPlan, str]]:
    plan = transformer_plan(2)
    parameter, operator, redistribution = plan.parameters[0], plan.operators[0], plan.redistributions[0]
    jump = Redistribution("x", "forward", (Layout((R, R)), Layout((S(0), S(1)))), ())
    slow = replace(redistribution, collectives=(Collective("all_gather", "dp", 1, float("nan")),))
    elsewhere = replace(redistribution, collectives=(Collective("all_gather", "pp", 1, 1.0),))
    return [
        (replace(plan, parameters=(parameter, parameter)), "name 'embed.weight' twice"),
        (replace(plan, operators=(operator, operator)), "twice"),
        (replace(plan, parameters=(replace(parameter, layout=Layout((R,))),)), "needs 2 placements, got 1"),
        (replace(plan, parameters=(replace(parameter, layout=Layout((S(5), R))),)), "cuts dim 5"),
        (replace(plan, parameters=(replace(parameter, dtype="torch.float32"),)), "unknown dtype 'torch.float32'"),
        (replace(plan, buffers=(replace(plan.buffers[0], name="x" * 2000),)), "longer than the 1000 characters"),
        (replace(plan, model="\ud800"), "half of a surrogate pair"),
        (replace(plan, operators=(replace(operator, inputs=(Layout((R,)),)),)), "needs 2 placements, got 1"),
        (replace(plan, redistributions=(jump,)), "no step leads from"),
        (replace(plan, redistributions=(slow,)), "negative, endless or not a number"),
        (replace(plan, redistributions=(elsewhere,)), "unknown mesh axis 'pp'"),
        (replace(plan, compute_s=float("inf")), "compute_s is inf"),
    ]


@pytest.mark.parametrize(("plan", "said"), _broken(), ids=[said for _, said in _broken()])
def test_a_plan_that_could_not_be_read_back_is_not_written(plan: ShardingPlan, said: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        dump_plan(plan)
    assert said in str(caught.value)
