"""The distance to an expert's plan: its parts add up, and what they say is what the two plans do."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autoshard.errors import PlanFileError
from autoshard.layout import parse_layout
from autoshard.plans import Execution, OperatorEntry, ShardingPlan, dump_plan, parse_plan, summary_json
from autoshard.plans.expert_attribution import Roles, distance
from autoshard.plans.expert_distance import MOST_PARTS, MOST_TENSORS, OTHERS, ROLES, SENT, block_of
from autoshard.plans.text.folded_plan import fold_plan
from autoshard.plans.text.name_patterns import format_pattern
from autoshard.plans.views.diff import diff_plans
from autoshard.plans.views.expert_words import expert_lines, rest_s
from autoshard.plans.views.redistribution_reasons import RedistributionReasons
from autoshard.plans.views.show import console_for, show_text

from .synthetic import costed, plans, sharded_plan, transformer_plan

OURS, THEIRS = transformer_plan(3), sharded_plan(3)


def held_against(plan: ShardingPlan = OURS, theirs: ShardingPlan = THEIRS) -> ShardingPlan:
    return replace(plan, against=distance(plan, "fsdp+tp", theirs))


def check_sums(plan: ShardingPlan, theirs: ShardingPlan) -> None:
    found = distance(plan, "fsdp", theirs)
    kinds = ((("computation",), "compute_s"), (SENT, "communication_s"), (("optimizer",), "optimizer_s"))
    for roles, name in kinds:
        expected = (getattr(theirs, name) or 0.0) - (getattr(plan, name) or 0.0)
        assert math.isclose(found.saved_s(roles), expected, rel_tol=1e-9, abs_tol=1e-9)
    saved = [part.saved_s for part in found.parts]
    assert saved == sorted(saved, reverse=True) and all(saved)
    assert len({(part.block, part.role) for part in found.parts}) == len(saved) <= MOST_PARTS + len(ROLES)
    assert len(found.tensors) <= MOST_TENSORS
    back = distance(theirs, "fsdp", plan)
    assert math.isclose(math.fsum(saved), -back.saved_s(), rel_tol=1e-9, abs_tol=1e-12)


def test_parts_add_up_to_the_distance_in_each_kind_of_time() -> None:
    check_sums(OURS, THEIRS)
    check_sums(OURS, replace(OURS, optimizer_s=0.5))
    check_sums(transformer_plan(1), sharded_plan(4))  # one has operators that the other has not


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(plans(), st.data())
def test_parts_of_any_two_plans_of_a_mesh_add_up(plan: ShardingPlan, data: st.DataObject) -> None:
    assume(plan.execution)  # of both, all operators are timed
    plan = replace(plan, communication_s=math.fsum(e.predicted_s for e in plan.redistributions))
    execution = tuple(replace(e, predicted_ns=data.draw(st.integers(0, 10**9))) for e in plan.execution)
    moved = tuple(entry for entry in plan.redistributions if data.draw(st.booleans()))
    other = replace(
        plan,
        execution=execution,
        redistributions=moved,
        compute_s=sum(e.predicted_ns for e in execution) / 1e9,
        communication_s=math.fsum(e.predicted_s for e in moved),
    )
    check_sums(plan, other)


def test_small_differences_that_cancel_out_are_none() -> None:
    names, times = ("big/mm", "a/mm", "b/mm"), ((2500, 0), (1, 0), (0, 1))

    def made(which: int) -> ShardingPlan:
        execution = tuple(Execution(name, "forward", each[which]) for name, each in zip(names, times))
        operators = tuple(OperatorEntry(name, "forward", (), ()) for name in names)
        compute_s = sum(each[which] for each in times) / 1e9
        none = {"redistributions": (), "communication_s": 0.0}
        return replace(OURS, execution=execution, operators=operators, compute_s=compute_s, **none)

    check_sums(made(0), made(1))


def test_a_plan_is_no_distance_from_itself() -> None:
    found = distance(OURS, "fsdp+tp", OURS)
    assert not found.parts and not any(tensor.saved_s for tensor in found.tensors)
    assert found.step_s == pytest.approx(OURS.step_s)
    (line,) = expert_lines(replace(OURS, against=found))
    assert line.endswith(": the same")


def test_differences_name_the_parameters_and_what_is_sent_for_them() -> None:
    found = distance(OURS, "fsdp+tp", THEIRS)
    weight = found.tensor("layers.1.attention.wq.weight", "parameters")
    assert weight is not None and weight.tensor == "layers.*.attention.wq.weight"
    assert weight.ours == "dp:R tp:S(0): all_reduce dp of the gradient"
    assert weight.theirs == "dp:S(1) tp:S(0): all_gather dp in the forward, reduce_scatter dp of the gradient"
    of_plans = [
        math.fsum(
            entry.predicted_s
            for entry in plan.redistributions
            if "wq.weight" in entry.tensor or any("wq.weight" in name for name in entry.consumers)
        )
        for plan in (OURS, THEIRS)
    ]
    assert [weight.ours_s, weight.theirs_s] == pytest.approx(of_plans)
    assert weight in found.within(found.part("layers.*", "parameters"))  # type: ignore[arg-type]


def test_redistributions_of_parameters_and_gradients_are_told_from_activations() -> None:
    roles = Roles(THEIRS)
    found = {(entry.tensor, entry.phase): roles.of(entry) for entry in THEIRS.redistributions}
    assert found["layers.0.attention.wq.weight", "forward"] == ("layers.0.attention.wq.weight", "parameters")
    assert found["layers.0.attention.wq/mm.1", "backward"] == ("layers.0.attention.wq.weight", "parameters")
    assert found["layers.0.attention.wo/mm", "forward"] == ("layers.0.attention.wo/mm", "activations")


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("layers.3.attention.wq/mm", "layers.*"),
        ("layers.3/add", "layers.*"),
        ("encoder.layers.10.fc.weight", "encoder.layers.*"),
        ("embed.weight", "embed"),
        ("embed/embedding", "embed"),
        ("/mul", ""),
        ("weight", ""),
        ("tokens", ""),
    ],
)
def test_blocks_are_layers_and_outer_modules(name: str, block: str) -> None:
    assert block_of(name) == block


def test_small_differences_are_put_together_by_role() -> None:
    many = transformer_plan(1)
    named = tuple(replace(e, name=f"m{k}/{e.name.rpartition('/')[2]}") for k, e in enumerate(many.operators))
    runs = {old.name: new.name for old, new in zip(many.operators, named)}
    plan = replace(
        many,
        operators=named,
        execution=tuple(replace(e, name=runs[e.name]) for e in many.execution),
        redistributions=(),
        communication_s=0.0,
    )
    grown = replace(plan, execution=tuple(replace(e, predicted_ns=2 * e.predicted_ns + 1) for e in plan.execution))
    grown = replace(grown, compute_s=sum(e.predicted_ns for e in grown.execution) / 1e9)
    found = distance(plan, "fsdp", grown)
    tiny = [part for part in found.parts if part.block == OTHERS]
    assert len(tiny) == 1 and tiny[0].role == "computation" and tiny[0].saved_s > 0
    check_sums(plan, grown)


def test_a_plan_file_keeps_the_distance_to_the_byte() -> None:
    plan = held_against()
    text = dump_plan(plan)
    assert parse_plan(text) == plan and dump_plan(parse_plan(text)) == text
    assert "  against:\n    expert: fsdp+tp\n" in text
    assert "against" not in dump_plan(OURS)


@pytest.mark.parametrize("name", ["compute_s", "communication_s", "optimizer_s"])
def test_a_file_whose_differences_do_not_add_up_is_refused(name: str) -> None:
    plan = held_against()
    assert plan.against is not None
    wrong = replace(plan, against=replace(plan.against, **{name: getattr(plan.against, name) + 0.001}))
    with pytest.raises(PlanFileError, match=f"the parts of against save .* of {name}"):
        dump_plan(wrong)
    text = dump_plan(plan).splitlines()
    at = next(k for k, line in enumerate(text) if line.startswith(f"    {name}:"))
    text[at] = f"    {name}: 0.5"
    with pytest.raises(PlanFileError, match="result, against"):
        parse_plan("\n".join(text) + "\n")


def test_plans_that_differ_in_the_distance_alone_are_the_same() -> None:
    found = diff_plans(OURS, held_against())
    assert found.same and not found.other
    both = diff_plans(held_against(), held_against(THEIRS, OURS))
    assert {"best plan of experts"} <= {number.name for number in both.numbers} and not both.same


def test_the_lines_add_up_to_the_head() -> None:
    plan = held_against()
    head, *lines = expert_lines(plan)
    assert plan.against is not None
    saved = plan.against.step_s - plan.step_s
    named = math.fsum(part.saved_s for part in plan.against.earning(3))
    assert named + rest_s(plan, plan.against) == pytest.approx(saved)
    assert "fsdp+tp" in head and len(lines) == len(plan.against.earning(3)) + 1
    out = io.StringIO()
    show_text(plan, console_for(out))
    assert all(line.strip() in out.getvalue() for line in (head, *lines))
    assert summary_json(plan)["against"]["expert"] == "fsdp+tp"  # type: ignore[index]
    assert summary_json(OURS)["against"] is None


def test_a_reason_says_what_the_expert_does_with_the_tensor() -> None:
    plan = held_against(THEIRS, OURS)
    folded = fold_plan(plan)
    reasons = RedistributionReasons(plan, folded.repeats)
    said = {format_pattern(line.pattern, folded.repeats): reasons.of(line) for line in folded.redistributions}
    gathered = said["layers.*.attention.wq.weight"]
    assert "dp:R tp:S(0): all_reduce dp of the gradient" in gathered
    assert "more than with fsdp+tp" in gathered or "less than with fsdp+tp" in gathered
    assert any(reason.endswith("; as fsdp+tp does") for reason in map(reasons.of, folded.redistributions))
    plain = RedistributionReasons(THEIRS, folded.repeats)
    for line in folded.redistributions:
        assert reasons.of(line).startswith(plain.of(line)) and "fsdp+tp" not in plain.of(line)


def test_what_is_computed_otherwise_is_told_by_its_layouts() -> None:
    entry = next(e for e in OURS.operators if e.name == "layers.0.norm/rms_norm")
    cut = replace(entry, outputs=(parse_layout("dp:S(0) tp:S(1)", OURS.mesh),))
    operators = tuple(cut if e is entry else e for e in OURS.operators)
    runs = tuple(replace(e, predicted_ns=e.predicted_ns // 2) if e.name == entry.name else e for e in OURS.execution)
    other = costed(
        replace(OURS, operators=operators, execution=runs, compute_s=sum(e.predicted_ns for e in runs) / 1e9)
    )
    found = distance(OURS, "sp", other).tensor(entry.name, "computation")
    assert found is not None and found.saved_s < 0 and found.ours != found.theirs
    assert found.theirs.endswith("dp:S(0) tp:S(1)")
