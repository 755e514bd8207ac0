"""Plans that compute again: checked, explained, planned again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.recomputation import again_name
from autoshard.review import check, explain, replan
from autoshard.review.explain_text import explanation_text

from ..models import graph_of
from ..plans_of import profile_of
from .subjects import example, plan_of

MODEL, CHECKPOINT = "llama of 2", ("checkpoint layers.*",)
SILU = "layers.0.feed_forward/silu"


def test_a_plan_that_computes_again_is_good_for_its_model() -> None:
    plan = plan_of(MODEL, constraints=CHECKPOINT)
    assert SILU in plan.recomputed
    review = check(plan, *example(MODEL), hardware=profile_of("slow"))
    assert [finding for finding in review.findings if not finding.fits] == []
    assert review.now_ns == review.best_ns == plan.solver.cost_ns


@pytest.mark.thorough
def test_an_operator_that_computes_again_is_explained_as_any_other() -> None:
    plan = plan_of(MODEL, constraints=CHECKPOINT)
    found = explain(plan, *example(MODEL), hardware=profile_of("slow"), why=again_name(SILU))
    assert f"{again_name(SILU)} is " in explanation_text(found)


def test_what_a_plan_computes_again_stays_unless_it_is_to_be_kept() -> None:
    """Pins added by hand: the plan starts from what it computes again, the constraints add and take away."""
    plan = plan_of(MODEL, constraints=CHECKPOINT)
    same = replan(plan, *example(MODEL), hardware=profile_of("slow"), original=plan).plan
    assert same.recomputed == plan.recomputed
    edited = replace(plan, pins=(*plan.pins, "keep */silu"))
    kept = replan(edited, *example(MODEL), hardware=profile_of("slow"), original=plan).plan
    assert set(kept.recomputed) == {name for name in plan.recomputed if not name.endswith("/silu")}
    assert kept.solver.cost_ns < plan.solver.cost_ns


@pytest.mark.thorough
def test_the_graph_of_the_model_stays_that_of_the_plan() -> None:
    plan = plan_of("llama", constraints=CHECKPOINT)
    assert plan.fingerprint == plan_of("llama").fingerprint == graph_of("llama").fingerprint
