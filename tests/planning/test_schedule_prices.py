"""What travels together is priced as a part of what all of it takes: never more than the schedule comes to."""

from __future__ import annotations

import math
from functools import cache

import pytest

import autoshard
from autoshard.constraints.baselines import baseline
from autoshard.mesh import Mesh
from autoshard.plans import ShardingPlan
from autoshard.plans.schedule import BUCKET_BYTES, schedule, sent
from cost_models import load_profile
from examples.llama import demo

PROFILE = load_profile("cpu-gloo")
SCHEMES = [("ddp", "dp=4"), ("fsdp", "dp=4"), ("fsdp+tp", "dp=2,tp=2")]


@cache
def made(scheme: str, axes: str, bucket: int = BUCKET_BYTES) -> ShardingPlan:
    mesh = Mesh.parse(axes)
    model, args = demo()
    constraints = baseline(scheme, mesh).constraints(mesh)
    return autoshard.plan(model, args, mesh=mesh, hardware=PROFILE, constraints=constraints, bucket=bucket)


def as_run_s(plan: ShardingPlan) -> float:
    """Seconds of all collectives as they run, one after the other."""
    topology = PROFILE.topology(plan.mesh.axes, plan.mesh.shape, None)
    return math.fsum(topology.collective_s(c.kind, plan.mesh.indices(c.axis), c.size_bytes) for c in sent(plan))


@pytest.mark.parametrize(("scheme", "axes"), SCHEMES)
def test_the_price_is_that_of_the_schedule_but_for_buckets_that_are_not_full(scheme: str, axes: str) -> None:
    plan = made(scheme, axes)
    priced_s = math.fsum(c.predicted_s for _, c in plan.collectives())
    run_s = as_run_s(plan)
    buckets = sum(len(bucket.travels) for bucket in schedule(plan).buckets)
    assert buckets, "nothing travels together"
    emptiest_s = max(PROFILE.topology(plan.mesh.axes, plan.mesh.shape, None).collective_s(k, 0, 1) for k in KINDS)
    assert priced_s <= run_s * (1 + 1e-9)
    assert run_s <= priced_s + buckets * emptiest_s


KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@pytest.mark.parametrize(("scheme", "axes"), SCHEMES)
def test_by_itself_every_collective_has_its_own_price(scheme: str, axes: str) -> None:
    plan = made(scheme, axes, bucket=0)
    assert not schedule(plan).buckets
    copied_s = math.fsum(c.predicted_s for _, c in plan.collectives()) - as_run_s(plan)  # what a step copies is in it
    assert -1e-9 <= copied_s <= 0.01 * plan.communication_s
    assert made(scheme, axes).step_s < plan.step_s
