"""Why a placement is as it is: golden answers, and laws of the what-if."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from autoshard.api import plan
from autoshard.errors import ConstraintError, LayoutError, PlanMismatchError
from autoshard.layout import format_layout
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.review import Explanation, explain
from autoshard.review.explain_text import explanation_json, explanation_text

from ..models import mlp
from ..plans_of import profile_of
from .subjects import GOLDEN, QUESTIONS, example, golden, plan_of

PINNED = ("x=dp:S(0)",)


def asked(why: str, instead: str | None = None, name: str = "mlp", pins: tuple[str, ...] = PINNED) -> Explanation:
    plan = plan_of(name, constraints=pins)
    return explain(plan, *example(name), why=why, instead=instead, hardware=profile_of("slow"))


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_answer_is_the_golden_text(name: str) -> None:
    """Written by ``python -m tests.review.subjects``."""
    assert golden(name) == (GOLDEN / f"{name}.txt").read_text()


@pytest.mark.parametrize("why", ["up.weight", "up.bias", "output.0", "/relu", "down/addmm", "down/bwd.mm"])
def test_the_alternative_is_a_plan_with_another_placement_that_costs_no_less(why: str) -> None:
    found = asked(why)
    assert found.alternative is not None and found.reason == ""
    assert not set(found.found) & set(found.present)
    assert found.alternative.solver.cost_ns >= found.plan.solver.cost_ns
    assert found.alternative.solver.status == "optimal"
    assert parse_plan(dump_plan(found.alternative)) == found.alternative


def test_asking_for_what_the_solver_found_otherwise_gives_one_as_cheap_and_as_near() -> None:
    def changed(plan: ShardingPlan) -> int:
        pairs = ((plan.operators, free.plan.operators), (plan.parameters, free.plan.parameters))
        pairs += ((plan.inputs, free.plan.inputs), (plan.outputs, free.plan.outputs))
        return sum(a != b for these, others in pairs for a, b in zip(these, others, strict=True))

    free = asked("up.weight")
    assert free.alternative is not None
    same = asked("up.weight", free.found[0])
    assert same.alternative is not None
    assert same.alternative.solver.cost_ns == free.alternative.solver.cost_ns
    assert changed(same.alternative) == changed(free.alternative)


def test_the_plan_is_priced_as_it_was_made() -> None:
    found = asked("up.weight")
    plan = plan_of("mlp", constraints=PINNED)
    assert found.plan.solver.cost_ns == plan.solver.cost_ns and not found.repriced
    assert found.plan.redistributions == plan.redistributions and found.plan.operators == plan.operators


def test_memory_that_the_file_says_is_what_would_be_found() -> None:
    plan = plan_of("mlp", constraints=PINNED)
    assert plan.memory is not None
    another = replace(plan.memory, timeline=(), kinds=())
    read = {
        "its own": plan,
        "no word": replace(plan, memory=None),
        "other prices": replace(plan, memory=another, compute_s=2 * plan.compute_s),
    }
    found = {
        name: explain(each, *example("mlp"), why="x", hardware=profile_of("slow")).plan.memory
        for name, each in read.items()
    }
    assert found == dict.fromkeys(read, plan.memory)


@pytest.mark.parametrize("why", ["up.bias", "output.0", "/relu"])
def test_no_more_changes_than_in_whatever_optimum_the_solver_finds(why: str) -> None:
    found = asked(why)
    assert found.alternative is not None
    any_optimum = plan_of("mlp", constraints=found.alternative.pins)
    assert any_optimum.solver.cost_ns == found.alternative.solver.cost_ns
    assert _changed(found.plan, found.alternative) <= _changed(found.plan, any_optimum)


def _changed(before: ShardingPlan, after: ShardingPlan) -> int:
    """How many parameters, inputs, outputs and operators two plans place otherwise."""
    sections = ("parameters", "inputs", "outputs", "operators")
    return sum(a != b for section in sections for a, b in zip(getattr(before, section), getattr(after, section)))


@pytest.mark.thorough
def test_one_layer_can_be_asked_about_alone() -> None:
    """Identical layers are decided once, but not with the one that is pinned."""
    present = asked("layers.1.attention.wo.weight", name="llama of 3", pins=())
    assert present.alternative is not None
    layouts = {e.name: format_layout(e.layout, present.plan.mesh) for e in present.alternative.parameters}
    others = [layouts[f"layers.{i}.attention.wo.weight"] for i in (0, 2)]
    assert [layouts["layers.1.attention.wo.weight"]] == list(present.found) and others == list(present.present) * 2


def test_other_prices_are_said_to_be_others() -> None:
    found = explain(
        plan_of("mlp", constraints=PINNED), *example("mlp"), why="up.weight", hardware=profile_of("cpu-gloo")
    )
    assert found.repriced and "priced with the profile of today" in explanation_text(found)


@pytest.mark.parametrize(
    ("why", "instead", "said"),
    [
        (
            "/relu",
            "dp:P(sum)",
            r"no rule of aten.relu.default gives /relu the layout dp:P\(sum\) tp:R; it can",
        ),
        ("up.weight", "(dp,)", r"the partition spec of 'up.weight=\(dp,\)' has 1 entries"),
        ("up.weight", "dp:S(2)", r"up.weight: dp:S\(2\) cuts dim 2 of a tensor of shape \[12, 8\]"),
        ("x", "dp:R", r"contradicts the pin 'x=dp:S\(0\)'"),
        ("down.bias", "dp:S(0) tp:S(1)", r"cuts dim 1 of a tensor of shape \[8\]"),
        ("down/addmm", "dp:S(0) -> dp:S(0)", r"down/addmm can have .* -> "),
    ],
)
def test_what_is_impossible_is_so_for_a_reason(why: str, instead: str, said: str) -> None:
    found = asked(why, instead)
    assert found.alternative is None and re.search(said, found.reason)
    assert explanation_json(found)["possible"] is False


def test_what_does_not_fit_the_budget_is_told_with_the_bytes() -> None:
    model, args = example("mlp of 8")
    free = plan_of("mlp of 8")
    assert free.memory is not None
    tight = plan(model, args, mesh="dp=2,tp=2", hardware=profile_of("slow"), memory=free.memory.peak.size_bytes)
    found = explain(tight, model, args, why="*.weight", instead="dp:R", hardware=profile_of("slow"))
    assert found.alternative is None
    assert re.search(
        r"no plan fits .* \(\d+ bytes\): the smallest budget found to work is .* \(\d+ bytes\)", found.reason
    )


def test_a_cut_that_leaves_a_rank_without_elements_is_told_by_the_shape() -> None:
    model, args = mlp(batch=6, hidden=2)
    made = plan(model, args, mesh="dp=4", hardware=profile_of("slow"))
    found = explain(made, model, args, why="up.bias", instead="dp:S(0)", hardware=profile_of("slow"))
    assert "up.bias has the shape [2]: cut as dp:S(0), some rank would hold nothing of it" in found.reason


@pytest.mark.parametrize(
    ("why", "instead", "error", "said"),
    [
        ("up.weigth", None, ConstraintError, "the nearest name is up.weight"),
        ("up.weight", "pp:R", LayoutError, "no such axis"),
        ("up.weight", "dp:Q", LayoutError, "cannot read"),
        ("x", "dp:S(0) tp:R", ConstraintError, "ask about another layout"),
    ],
)
def test_a_question_that_cannot_be_asked_is_a_mistake(
    why: str, instead: str | None, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        asked(why, instead)


def test_a_plan_for_another_model_is_refused() -> None:
    with pytest.raises(PlanMismatchError, match="autoshard check"):
        explain(plan_of("mlp", constraints=PINNED), *mlp(hidden=16), why="x", hardware=profile_of("slow"))
