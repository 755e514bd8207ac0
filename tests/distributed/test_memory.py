"""Budgets are kept by real processes: what a rank holds while it trains never exceeds what its plan was made under."""

from __future__ import annotations

import warnings
from functools import cache

import numpy as np
import pytest
import torch

import autoshard
from autoshard.errors import BudgetError
from autoshard.plans import ShardingPlan

from ..one_process import OPTIMIZERS
from . import cases
from .harness import run_ranks
from .parity import check_parity, device_mesh_of

CASE, AXES = "mlp", "dp=2,tp=2"
PINS = ("x=dp:S(0)",)
BUDGETS = 3


@cache
def plans() -> list[ShardingPlan]:
    """Plans under random budgets between one that nothing fits and one that everything does, the loosest first."""
    model, args = cases.make(CASE)

    def plan(memory: int | None) -> ShardingPlan:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # not proven optimal
            return autoshard.plan(
                model, args, mesh=AXES, hardware="cpu-gloo", pins=PINS, memory=memory, time_limit_s=20.0
            )

    free = plan(None)
    assert free.memory is not None
    with pytest.raises(BudgetError) as caught:
        plan(1)
    least = int(str(caught.value).partition("found to work is ")[2].partition("(")[2].partition(" bytes")[0])
    draw = np.random.default_rng(5)
    budgets = sorted(draw.integers(least, int(free.memory.peak.size_bytes * 1.1), BUDGETS).tolist(), reverse=True)
    return [plan(budget) for budget in budgets]


def _peaks(texts: list[str]) -> list[int]:
    """The peak of this rank in the third step of each plan."""
    peaks = []
    for text in texts:
        plan = autoshard.parse_plan(text)
        mesh = device_mesh_of(plan)
        parallel = autoshard.parallelize(cases.make(CASE)[0], plan, mesh)
        optimizer = OPTIMIZERS["adamw"](parallel.parameters())
        for step in range(3):
            shards = autoshard.shard_inputs(plan, mesh, *cases.batch(CASE, step))
            state = [value for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
            with autoshard.measure_memory(*parallel.parameters(), *parallel.buffers(), *state, *shards) as log:
                parallel(*shards).backward()
                optimizer.step()
            optimizer.zero_grad()
        peaks.append(log.peak_bytes)
    return peaks


def test_random_budgets_are_respected_on_every_rank():
    made = plans()
    budgets = [plan.memory.budget_bytes for plan in made if plan.memory]
    assert len(set(budgets)) == BUDGETS
    for peaks in run_ranks(4, _peaks, [autoshard.dump_plan(plan) for plan in made], timeout_s=180.0):
        assert all(peak <= budget for peak, budget in zip(peaks, budgets, strict=True)), (peaks, budgets)
        predicted = [plan.memory.peak.size_bytes for plan in made if plan.memory]
        assert all(abs(peak - said) <= 0.1 * said for peak, said in zip(peaks, predicted, strict=True))


def test_the_cost_never_falls_as_the_budget_shrinks():
    costs = [plan.solver.cost_ns for plan in plans()]
    assert costs == sorted(costs) and costs[0] < costs[-1]


def test_the_plan_of_the_tightest_budget_trains_as_one_process_does():
    tightest = plans()[-1]
    assert any(redistribution.collectives for redistribution in tightest.redistributions)
    results = run_ranks(4, check_parity, CASE, autoshard.dump_plan(tightest))
    assert all(seen.within(1e-4) for seen in results), results
