"""Ranks that are not alike are told apart before anything is run: every rank says which one differs, and in what."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import apply
from autoshard.capture.by_numbers.static_shapes import ByNumbersError
from autoshard.errors import JobError, PlanMismatchError
from autoshard.layout import format_layout
from autoshard.lowering import identity
from autoshard.plans import ShardingPlan

from . import cases
from .harness import caught, run_ranks
from .parity import device_mesh_of, full

CASE = "mlp odd"
ODD = 2
"""The rank that differs."""


def _plans() -> tuple[ShardingPlan, ShardingPlan]:
    """Two plans of one graph with other layouts: each alone trains rightly."""
    pins = ["x=dp:S(0)", "target=dp:S(0)"]
    model, args = cases.make(CASE)
    options: dict[str, Any] = {"mesh": "dp=2,tp=2", "hardware": cases.slow_machine()}
    one, other = (
        autoshard.plan(model, args, pins=[*pins, f"up.weight={layout}"], **options) for layout in ("tp:S(0)", "tp:R")
    )
    assert one.fingerprint == other.fingerprint and one != other
    return one, other


class _Branch(nn.Module):
    """A model that cannot be captured."""

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return x.sum() if x.sum() > 0 else target.sum()


def _differences(text: str, other_text: str) -> dict[str, tuple[str, str]]:
    """What parallelize says on this rank when rank ODD differs in one thing after the other."""
    plan, other = autoshard.parse_plan(text), autoshard.parse_plan(other_text)
    mesh, odd = device_mesh_of(plan), dist.get_rank() == ODD
    turned = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    model, args = cases.make(CASE)
    with torch.device("meta"):
        empty = cases.make(CASE)[0]
    wider = cases.mlp(7, 9, 14)[0]
    frozen = cases.make(CASE)[0]
    frozen.up.weight.requires_grad_(False)
    attempts: dict[str, Callable[[], Any]] = {
        "plan": lambda: autoshard.parallelize(model, other if odd else plan, mesh),
        "prices": lambda: autoshard.parallelize(model, replace(plan, model="x") if odd else plan, mesh),
        "mesh": lambda: autoshard.parallelize(model, plan, turned if odd else mesh),
        "model": lambda: autoshard.parallelize(wider if odd else model, plan, mesh),
        "configuration": lambda: autoshard.parallelize(frozen if odd else model, plan, mesh),
        "arguments": lambda: autoshard.parallelize(model, plan, mesh, tuple(x[:6] if odd else x for x in args)),
        "capture": lambda: autoshard.parallelize(_Branch() if odd else model, plan, mesh),
        "meta device": lambda: autoshard.parallelize(empty if odd else model, plan, mesh),
        "random": lambda: autoshard.parallelize(model, plan, mesh, random="as-one-process" if odd else "per-shard"),
    }
    errors = {what: caught(attempt) for what, attempt in attempts.items()}
    with mock.patch.object(identity, "code_digest", lambda: "sha256:0" if odd else "sha256:1"):
        errors["code"] = caught(attempts["configuration"])
    with mock.patch.object(torch, "__version__", "9.9.9" if odd else torch.__version__):
        errors["torch"] = caught(attempts["configuration"])
    parallel = autoshard.parallelize(model, plan, mesh)  # and what is alike runs, after all this
    shards = autoshard.shard_inputs(plan, mesh, *args)
    assert torch.isfinite(full(parallel(*shards)))
    return errors


def test_a_rank_that_differs_is_named_by_every_rank_with_what_differs() -> None:
    one, other = _plans()
    results = run_ranks(4, _differences, *map(autoshard.dump_plan, (one, other)))
    ours, odd = next(pair for pair in zip(one.parameters, other.parameters) if pair[0] != pair[1])
    texts = tuple(format_layout(entry.layout, one.mesh) for entry in (odd, ours))
    assert all(errors.keys() == results[0].keys() for errors in results)
    for what, kind, said in [
        ("plan", JobError, f"first difference: {odd.name} is {texts[0]} on rank 2 and {texts[1]} on rank 0"),
        ("prices", JobError, "differ in the plan"),
        ("mesh", PlanMismatchError, "this job has tp=2,dp=2"),
        ("model", PlanMismatchError, "down.weight is float32[9, 13] in the plan and float32[9, 14] in the model"),
        ("configuration", PlanMismatchError, "operator"),
        ("arguments", PlanMismatchError, "the input x is float32[7, 9] in the plan and float32[6, 9] in the example"),
        ("capture", ByNumbersError, ""),
        ("meta device", JobError, "4 of 4 on the meta device"),
        ("random", JobError, "differ in the random numbers: as-one-process on rank 2, per-shard on rank 0"),
        ("code", JobError, "differ in the autoshard code: sha256:0 on rank 2, sha256:1 on rank 0"),
        ("torch", JobError, "differ in the torch version: 9.9.9 on rank 2"),
    ]:
        own = results[ODD][what]
        assert own[0] == kind.__name__ and said in own[1], (what, own)
        for rank in (0, 1, 3):
            found = results[rank][what]
            assert found[0] == JobError.__name__, (what, found)
            assert found[1].startswith("rank 2 failed while ") and own[1][:200] in found[1], (what, found)


def _one_stays_away(text: str, ends: bool) -> tuple[str, str]:
    """Rank ODD does not come to parallelize, or ends while it captures."""
    plan = autoshard.parse_plan(text)
    mesh = device_mesh_of(plan)
    model = cases.make(CASE)[0]
    dist.barrier()  # all are connected
    if dist.get_rank() == ODD:
        if ends:
            with mock.patch.object(apply, "capture", lambda *_, **__: os._exit(7)):
                autoshard.parallelize(model, plan, mesh)
        os._exit(7)
    return caught(lambda: autoshard.parallelize(model, plan, mesh))


def test_a_rank_that_does_not_come_is_named() -> None:
    one, _ = _plans()
    results = run_ranks(4, _one_stays_away, autoshard.dump_plan(one), False, dying=(ODD,), group_timeout_s=6.0)
    for kind, said in (results[0], results[1], results[3]):
        assert kind == JobError.__name__
        assert "waited 6 s for the other ranks, comparing plans: rank 2 did not come" in said


def test_a_rank_that_ends_in_the_middle_is_named() -> None:
    one, _ = _plans()
    results = run_ranks(4, _one_stays_away, autoshard.dump_plan(one), True, dying=(ODD,), group_timeout_s=6.0)
    for kind, said in (results[0], results[1], results[3]):
        assert kind == JobError.__name__
        assert "waited 6 s for the other ranks, capturing the model: rank 2 did not get ready" in said
