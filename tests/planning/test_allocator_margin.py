"""A budget is of what the device counts: the bytes in use and the margin of its allocator."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autoshard
from autoshard.errors import BudgetError
from autoshard.plans import ShardingPlan, dump_plan, parse_plan
from autoshard.plans.memory_outcome import allowed_bytes, reserved_bytes
from autoshard.plans.views.summary import summarize
from autoshard.review import check
from cost_models import load_profile

from ..distributed import cases
from ..plans_of import profile_of

MARGIN = 0.09
margins = st.sampled_from([0.0, 0.09, 0.1]) | st.floats(0, 1)
sizes = st.integers(0, 1 << 50)


@cache
def plan(margin: float, **options: Any) -> ShardingPlan:
    hardware = replace(profile_of("slow"), allocator_margin=margin)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not proven optimal
        options = {"mesh": "dp=2,tp=2", "hardware": hardware, "optimizer": "none", "pins": "x=dp:S(0)"} | options
        return autoshard.plan(*cases.make("mlp"), **options)


def peak(plan: ShardingPlan) -> int:
    assert plan.memory is not None
    return plan.memory.peak.size_bytes


@given(sizes, sizes, margins)
def test_bytes_are_allowed_exactly_where_what_is_reserved_for_them_is_within_the_budget(
    size: int, budget: int, margin: float
) -> None:
    assert (size <= allowed_bytes(budget, margin)) == (reserved_bytes(size, margin) <= budget)
    assert size <= reserved_bytes(size, margin) <= 2 * size + 1


def test_a_plan_fits_its_budget_with_the_margin() -> None:
    """A budget that holds the free plan without the margin, and with it does not."""
    budget = peak(plan(0.0)) + 1
    found = plan(MARGIN, memory=budget)
    assert found.memory is not None and found.memory.allocator_margin == MARGIN
    assert peak(found) * (1 + MARGIN) <= budget and found.memory.over_bytes == 0
    assert peak(plan(0.0, memory=budget)) == peak(plan(0.0)) > peak(found)
    assert found.solver.cost_ns > plan(0.0).solver.cost_ns


def test_a_margin_without_a_budget_changes_nothing_but_what_is_said_of_it() -> None:
    bare, found = plan(0.0), plan(MARGIN)
    assert bare.memory is not None and "allocator_margin" not in dump_plan(bare)
    said = replace(bare, hardware_fingerprint=found.hardware_fingerprint)
    assert found == replace(said, memory=replace(bare.memory, allocator_margin=MARGIN)) != bare
    assert parse_plan(dump_plan(found)) == found


def test_the_smallest_budget_is_named_with_the_margin_and_works() -> None:
    with pytest.raises(BudgetError, match=r"allocated, .* reserved with the allocator's margin of 0\.09") as caught:
        plan(MARGIN, mesh="dp=2", memory=100)
    needed = int(str(caught.value).partition("found to work is ")[2].partition("(")[2].partition(" bytes")[0])
    assert peak(plan(MARGIN, mesh="dp=2", memory=needed)) * (1 + MARGIN) <= needed
    with pytest.raises(BudgetError):
        plan(MARGIN, mesh="dp=2", memory=needed // 2)


def test_a_check_holds_the_plan_against_its_budget_with_the_margin_of_the_profile_now() -> None:
    made = plan(0.0, memory=peak(plan(0.0)))
    for margin, fits in ((0.0, True), (MARGIN, False)):
        hardware = replace(profile_of("slow"), allocator_margin=margin)
        found = check(made, *cases.make("mlp"), hardware=hardware, within=10.0)
        (memory,) = (finding for finding in found.findings if finding.part == "memory")
        assert memory.fits == fits and ("reserved with the allocator's margin" in memory.said) == (margin > 0)


def test_a_tightened_plan_is_good_under_its_own_margin() -> None:
    made = plan(MARGIN, memory=peak(plan(0.0)))
    hardware = replace(profile_of("slow"), allocator_margin=MARGIN)
    assert check(made, *cases.make("mlp"), hardware=hardware, within=10.0).fits


def test_the_budget_of_a_profile_is_its_memory_less_its_margin() -> None:
    found = autoshard.plan(*cases.make("mlp"), mesh="dp=2,tp=2", hardware="dgx-h100", memory="profile")
    assert found.memory is not None and found.memory.budget_bytes == load_profile("dgx-h100").memory_bytes
    assert found.memory.allocator_margin == load_profile("dgx-h100").allocator_margin == MARGIN
    summary = summarize(found).memory
    assert summary is not None and summary.reserved_bytes == reserved_bytes(peak(found), MARGIN)


def test_profiles_of_cuda_have_the_margin_of_its_allocator_and_others_none() -> None:
    shipped = ("dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "cpu-gloo", "tpu-v5e")
    assert [load_profile(name).allocator_margin for name in shipped] == [MARGIN] * 4 + [0.0] * 2
