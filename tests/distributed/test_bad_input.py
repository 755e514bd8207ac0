"""What goes wrong in a job is an error on every rank that says what to do, and never a hang."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import autoshard
from autoshard.errors import (
    ConstraintError,
    InputError,
    JobError,
    MeshError,
    PlanMismatchError,
)
from autoshard.plans import ShardingPlan

from . import cases
from .harness import caught, run_ranks
from .parity import device_mesh_of

CASE = "mlp odd"  # batch 7, width 9, hidden 13
AXES = "dp=2,tp=2"


@pytest.fixture(scope="module")
def plan() -> ShardingPlan:
    return cases.sharded_plan(CASE, AXES)


def _wrong_calls(text: str) -> dict[str, tuple[str, str]]:
    """The error of each wrong way to call, none of which may disturb the right call after it."""
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    model, (x, target) = cases.make(CASE)
    parallel = autoshard.parallelize(model, plan, mesh)
    x_part, target_part = autoshard.shard_inputs(plan, mesh, x, target)
    replicated = distribute_tensor(x, mesh, [Replicate(), Replicate()])
    calls: dict[str, Callable[[], Any]] = {
        "full batch": lambda: parallel(x, target),
        "other batch": lambda: parallel(x_part[:1], target_part[:1]),
        "dtype": lambda: parallel(x_part.double(), target_part),
        "missing": lambda: parallel(x_part),
        "placed otherwise": lambda: parallel(replicated, target_part),
        "wants gradient": lambda: parallel(x_part.clone().requires_grad_(), target_part),
        "shard_inputs of shards": lambda: autoshard.shard_inputs(plan, mesh, x_part, target_part),
        "shard_inputs of one": lambda: autoshard.shard_inputs(plan, mesh, x),
        "shard_inputs by the module": lambda: autoshard.shard_inputs(parallel, mesh, x, target),
        "sampler by a path": lambda: autoshard.sampler("plan.yaml", mesh, [x]),
    }
    errors = {what: caught(call) for what, call in calls.items()}
    parallel(x_part, target_part).backward()
    return errors


def test_wrong_calls_name_what_is_wrong_and_the_remedy(plan: ShardingPlan):
    for errors in run_ranks(4, _wrong_calls, autoshard.dump_plan(plan)):
        assert {kind for kind, _ in errors.values()} == {InputError.__name__}, errors
        for what, text in {
            "full batch": "autoshard.shard_inputs",
            "other batch": "the plan was made for [7, 9] in all",
            "dtype": "x has dtype torch.float64; the plan was made for float32",
            "missing": "missing a required argument: 'target'; the plan was made for the tensors x, target",
            "placed otherwise": "redistribute it first",
            "wants gradient": "detach",
            "shard_inputs of shards": "the full batch is [7, 9]",
            "shard_inputs of one": "the plan has 2 inputs (x, target); 1 tensors were given",
            "shard_inputs by the module": "in the place of a plan: give model.plan",
            "sampler by a path": "is a str in the place of a plan: a file is read by autoshard.read_plan",
        }.items():
            assert text in errors[what][1], errors[what]


def _wrong_plans(text: str) -> dict[str, tuple[str, str]]:
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    nameless = init_device_mesh("cpu", (2, 2))
    model, args = cases.make(CASE)
    wider = cases.mlp(7, 9, 14)[0]
    other = nn.Sequential(nn.Linear(9, 9))
    frozen = cases.make(CASE)[0]
    frozen.up.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attempts: dict[str, Callable[[], Any]] = {
        "axes": lambda: autoshard.parallelize(model, plan, turned),
        "ranks": lambda: autoshard.parallelize(model, plan, flat),
        "nameless": lambda: autoshard.parallelize(model, plan, nameless),
        "nameless one call": lambda: autoshard.auto_parallelize(model, nameless, args),
        "wider model": lambda: autoshard.parallelize(wider, plan, mesh),
        "other model": lambda: autoshard.parallelize(other, plan, mesh, (args[0],)),
        "other batch": lambda: autoshard.parallelize(model, plan, mesh, tuple(x[:6] for x in args)),
        "other dtype": lambda: autoshard.parallelize(cases.make(CASE)[0].double(), plan, mesh),
        "frozen": lambda: autoshard.parallelize(frozen, plan, mesh),
    }
    errors = {what: caught(attempt) for what, attempt in attempts.items()}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items()), "the model was changed"
    return errors


def test_plan_for_something_else_says_which_part_differs(plan: ShardingPlan):
    for errors in run_ranks(4, _wrong_plans, autoshard.dump_plan(plan)):
        for what, kind, text in [
            ("axes", PlanMismatchError, "made for the mesh dp=2,tp=2 (4 ranks); this job has tp=2,dp=2"),
            ("ranks", PlanMismatchError, "this job has dp=4 (4 ranks)"),
            ("nameless", MeshError, "mesh_dim_names"),
            ("nameless one call", MeshError, "mesh_dim_names"),
            (
                "wider model",
                PlanMismatchError,
                "down.weight is float32[9, 13] in the plan and float32[9, 14]",
            ),
            ("other model", PlanMismatchError, "has the parameter"),
            ("other batch", PlanMismatchError, "input x is float32[7, 9] in the plan and float32[6, 9]"),
            ("frozen", PlanMismatchError, "operator"),
        ]:
            assert errors[what][0] == kind.__name__ and text in errors[what][1], (what, errors[what])
        assert errors["other dtype"][0], "float64 parameters with float32 inputs"


def _fails_to_plan(pin: str) -> tuple[str, str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, args = cases.make(CASE)
    dist.barrier()
    began = time.monotonic()
    kind, text = caught(lambda: autoshard.auto_parallelize(model, mesh, args, pins=[pin]))
    return kind, text, time.monotonic() - began


@pytest.mark.parametrize("pin", ["nowhere=dp:S(0)", "up.weight=dp:S(7)"])
def test_planning_failure_on_the_first_rank_raises_on_every_rank_at_once(pin: str):
    first, *others = run_ranks(4, _fails_to_plan, pin)
    assert first[0] == ConstraintError.__name__
    for kind, text, _ in others:
        assert kind == JobError.__name__ and text.startswith("rank 0 failed while planning: ") and first[1] in text
    assert max(seconds for _, _, seconds in (first, *others)) < 20


def _dies_in_the_step(text: str, victim: int) -> tuple[str, float]:
    """Rank ``victim`` ends between its forward and its backward; the others run on into the next collectives."""
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    model, batch = cases.make(CASE)
    parallel = autoshard.parallelize(model, plan, mesh)
    shards = autoshard.shard_inputs(plan, mesh, *batch)
    parallel(*shards).backward()
    dist.barrier()
    began = time.monotonic()

    def steps() -> None:
        for _ in range(3):
            loss = parallel(*shards)
            if dist.get_rank() == victim:
                os._exit(7)
            loss.backward()

    kind, _ = caught(steps)
    return kind, time.monotonic() - began


@pytest.mark.parametrize("victim", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_rank_that_dies_in_a_step_ends_the_others_with_an_error(plan: ShardingPlan, victim: int):
    results = run_ranks(4, _dies_in_the_step, autoshard.dump_plan(plan), victim, dying=(victim,), group_timeout_s=6.0)
    assert results.pop(victim) is None
    for kind, seconds in results:
        assert kind, "a rank finished three steps without the one that died"
        assert seconds < 25
